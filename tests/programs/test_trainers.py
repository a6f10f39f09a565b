"""Libraries that train models: a short run of each with a compiled model, equal to eager bit by bit."""

import importlib.util
import logging
import warnings

import pytest
import torch
from torch import nn

import foregrad
from helpers import nop


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def as_it_is(module):
    return module


def compiled(module):
    return foregrad.aot_module(module, nop)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def batches():
    x = torch.randn(32, 4)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 8)


def require_same(ours, theirs):
    """The same losses, and the same parameters and buffers afterwards, under the same names."""
    (model, losses), (eager, expected) = ours, theirs
    assert losses == expected and len(losses) > 4
    assert list(model.state_dict()) == list(eager.state_dict())
    for name, value in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ----------------------------------------------------------------------------------------------------- Hugging Face
class Sentences(torch.utils.data.Dataset):
    """Sentences of one length: a mask would be read, to see whether anything is padded."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        tokens = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": torch.tensor(i % 2)}


def tiny_bert():
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(config)


def train_by_hugging_face(transform, folder, **options):
    import transformers

    model = transform(tiny_bert())
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    trainer.save_model(str(folder))
    require_same((type(tiny_bert()).from_pretrained(str(folder)), losses), (model, losses))
    return model, losses


@needs("transformers")
@needs("accelerate")
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_the_trainer_of_hugging_face(options, tmp_path):
    ours = train_by_hugging_face(compiled, tmp_path, **options)
    require_same(ours, train_by_hugging_face(as_it_is, tmp_path, **options))
    assert len(ours[0].specializations) <= 3


@needs("transformers")
def test_a_compiled_model_generates(monkeypatch):
    """Each step has a longer cache than the one before, and so is a program of its own, which is said."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ours, tokens = compiled(model), torch.arange(1, 6)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(tokens, **options), model.generate(tokens, **options))
    assert ours.config is model.config and len(ours.specializations) == 4
    assert str(ours.recompiles[-1]).startswith(
        "kwargs['past_key_values'].layers[0].keys: size of dimension 2 was 6, is 7"
    )


# --------------------------------------------------------------------------------------------- Lightning and Fabric
def train_by_lightning(inner, outer, **options):
    import lightning

    losses = []

    class Regression(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("loss", loss)
            losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    model = outer(Regression(inner(small_net())))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=True, **quiet, **options)
    trainer.fit(model, batches(), batches())
    return model, [*losses, trainer.callback_metrics["val"].item()]


@needs("lightning")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_lightning(options):
    eager = train_by_lightning(as_it_is, as_it_is, **options)
    inside = train_by_lightning(compiled, as_it_is, **options)
    require_same(inside, eager)
    assert len(inside[0].net.specializations) == 2
    whole = train_by_lightning(as_it_is, compiled, **options)
    require_same(whole, eager)
    require_same(train_by_lightning(compiled, compiled, **options), eager)


def train_by_fabric(before, after, **options):
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", **options)
    model = before(small_net())
    called, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    called, losses = after(called), []
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(called(x), y)
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return model, losses


@needs("lightning")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_fabric(options):
    require_same(train_by_fabric(compiled, as_it_is, **options), train_by_fabric(as_it_is, as_it_is, **options))


@needs("lightning")
def test_what_fabric_has_set_up():
    require_same(train_by_fabric(as_it_is, compiled), train_by_fabric(as_it_is, as_it_is))


# ------------------------------------------------------------------------------------------------------- Accelerate
def train_by_accelerate(transform, **options):
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = transform(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
    whole = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    losses.append(whole.eval()(torch.ones(2, 4)).tolist())
    return whole, losses


@needs("accelerate")
@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}], ids=str)
def test_accelerate(options):
    ours = train_by_accelerate(compiled, **options)
    require_same(ours, train_by_accelerate(as_it_is, **options))
    assert isinstance(ours[0], nn.Sequential) and len(ours[0].specializations) == 2
