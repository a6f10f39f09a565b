"""Models of `transformers`, an optional extra, made from their configurations: a program inside a large library."""

import copy

import pytest
import torch

import foregrad
import hugging_face
from helpers import nop

pytestmark = [
    pytest.mark.skipif(not hugging_face.INSTALLED, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore"),  # the library's own
]

PROGRAMS = {"hf_vit": 2}  # its first call notes in its config which kind of loss it takes, and reads that from then on


@pytest.mark.parametrize("name", hugging_face.NAMES)
def test_three_steps_of_training_are_those_of_eager(name):
    """F-1, F-2: the guards of a program that reaches a large library let its own calls in. Tied weights and all."""
    losses = {}
    for side in ("eager", "compiled"):
        torch.manual_seed(0)
        loss, args = hugging_face.build(name)
        program = foregrad.aot_module(loss, nop) if side == "compiled" else loss
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        losses[side] = []
        for _ in range(3):
            optimizer.zero_grad()
            value = program(*args)
            value.backward()
            optimizer.step()
            losses[side].append(value.item())
        if side == "compiled":
            assert len(program.specializations) == PROGRAMS.get(name, 1)
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-6)
    assert len({*losses["eager"]}) == 3


# ------------------------------------------------------------------- objects, as the library takes and returns them
def tiny_llama(kind="Llama", **more):
    import transformers as hf

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(hf, f"{kind}Config")(
        vocab_size=30, num_key_value_heads=1, max_position_embeddings=64, **sizes, **more
    )
    return getattr(hf, f"{kind}ForCausalLM")(config).eval()


def tiny_bart():
    import transformers as hf

    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    return hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=30, max_position_embeddings=32, **layers, **sizes)
    ).eval()


def assert_same(one, other, path="output"):
    """The same classes, fields, plain values and tensors, bit by bit."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad, path
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    elif isinstance(one, dict) and not hasattr(one, "to_diff_dict"):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif hasattr(one, "layers") or hasattr(one, "keys"):
        assert_same(vars(one), vars(other), path)


@pytest.mark.parametrize("name", hugging_face.NAMES)
def test_a_model_is_called_as_its_docs_say(name):
    """F-3, F-4: with named tensors; what it returns is an output object with everything in it, a cache too."""
    loss, args = hugging_face.build(name)
    given = dict(zip(loss.names, args, strict=True))
    eager, program = loss.model, foregrad.aot_module(copy.deepcopy(loss.model), nop)
    for _ in range(2):
        known, found = eager(**given), program(**given)
        assert_same(known, found)
        assert found["logits"] is found.logits and found[0] is found.loss
        known.loss.backward()
        found.loss.backward()
    for (name, one), (_, other) in zip(eager.named_parameters(), program.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


CACHES = {
    "dynamic": (tiny_llama, lambda hf, config: hf.DynamicCache(config=config)),
    "static": (tiny_llama, lambda hf, config: hf.StaticCache(config=config, max_cache_len=32)),
    "sliding": (
        lambda: tiny_llama("Mistral", sliding_window=5),
        lambda hf, config: hf.DynamicCache(config=config),
    ),
}


def decode(model, cache, steps):
    """Greedy decoding, token by token."""
    tokens, found = torch.arange(4)[None], []
    for _ in range(steps):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        found.append(out.logits)
        tokens = out.logits[:, -1:].argmax(-1)
    return found


@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_decoding_with_a_cache(name):
    """F-4: the model changes the cache that it is given, and gives it back."""
    import transformers as hf

    build, make = CACHES[name]
    model = build()
    one, other = make(hf, model.config), make(hf, model.config)
    program = foregrad.aot_module(model, nop)
    assert_same(decode(model, one, 6), decode(program, other, 6))
    assert_same(one, other)
    if name == "static":  # one to fill it, one for each step
        assert len(program.specializations) == 2


@torch.no_grad()
def test_fifty_steps_need_few_programs_where_sizes_are_symbols():
    import transformers as hf

    model = tiny_llama()
    one, other = (hf.DynamicCache(config=model.config) for _ in range(2))
    program = foregrad.aot_module(model, nop, dynamic=True)
    assert_same(decode(model, one, 50), decode(program, other, 50))
    assert_same(one, other)
    assert len(program.specializations) <= 3


@torch.no_grad()
def test_decoding_with_the_caches_of_encoder_and_decoder():
    import transformers as hf

    model = tiny_bart()
    program = foregrad.aot_module(model, nop)
    encoded, results = model.get_encoder()(torch.arange(3, 9)[None]), []
    for side in (model, program):
        cache = hf.EncoderDecoderCache(*(hf.DynamicCache(config=model.config) for _ in range(2)))
        token, found = torch.tensor([[2]]), []
        for _ in range(3):
            out = side(encoder_outputs=encoded, decoder_input_ids=token, past_key_values=cache)
            assert out.past_key_values is cache
            found.append(out.logits)
            token = out.logits[:, -1:].argmax(-1)
        results.append((found, cache.self_attention_cache, cache.cross_attention_cache, cache.is_updated))
    assert_same(*results)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_are_made_as_in_eager(attention):
    """Eager leaves out a mask that masks nothing: attention takes another kernel then. To ask that is to read data."""
    import transformers

    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(30, (2, 8))

    def program(tokens, mask=None):
        return model(tokens, attention_mask=mask).logits

    compiled = foregrad.aot_function(program, nop)
    assert torch.equal(compiled(tokens), program(tokens))
    padded = torch.ones_like(tokens)
    padded[1, 5:] = 0
    for mask in (torch.ones_like(tokens), padded, torch.ones_like(tokens)):
        assert torch.equal(compiled(tokens, mask), program(tokens, mask))
    # Without a mask, with one that masks nothing, and, where that has another kernel, with padding.
    assert len(compiled.specializations) == (2 if attention == "eager" else 3)
