"""Models of Hugging Face, made from small configurations: nothing is downloaded. Each returns its loss."""

import importlib.util
import os

import torch
from torch import nn

INSTALLED = importlib.util.find_spec("transformers") is not None
NAMES = ("bert", "hf_gpt2", "hf_t5", "hf_llama", "hf_vit")


class Loss(nn.Module):
    """A model that is called with named tensors, as one that takes them by place and returns its loss."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args):
        return self.model(**dict(zip(self.names, args, strict=True))).loss


def build(name, dropout=False):
    """A model in training mode, and an example call. Its dropout is switched off unless it is asked for."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers as hf

    tokens, labels = torch.randint(30, (2, 8)), torch.randint(30, (2, 8))
    rate = 0.1 if dropout else 0.0
    match name:
        case "bert":
            config = hf.BertConfig(
                vocab_size=30,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=24,
                max_position_embeddings=16,
                hidden_dropout_prob=rate,
                attention_probs_dropout_prob=rate,
            )
            mask = torch.ones(2, 8, dtype=torch.long)
            mask[1, 5:] = 0
            model = hf.BertForMaskedLM(config)
            given = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        case "hf_gpt2":
            config = hf.GPT2Config(
                vocab_size=30,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=16,
                bos_token_id=0,
                eos_token_id=0,
                resid_pdrop=rate,
                embd_pdrop=rate,
                attn_pdrop=rate,
            )
            model, given = hf.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": labels}
        case "hf_t5":
            config = hf.T5Config(
                vocab_size=30,
                d_model=16,
                d_kv=8,
                d_ff=24,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
                dropout_rate=rate,
            )
            model, given = (
                hf.T5ForConditionalGeneration(config),
                {"input_ids": tokens, "labels": torch.randint(30, (2, 6))},
            )
        case "hf_llama":
            config = hf.LlamaConfig(
                vocab_size=30,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=16,
                attention_dropout=rate,
            )
            model, given = hf.LlamaForCausalLM(config), {"input_ids": tokens, "labels": labels}
        case "hf_vit":
            config = hf.ViTConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=24,
                image_size=16,
                patch_size=8,
                num_labels=3,
                hidden_dropout_prob=rate,
                attention_probs_dropout_prob=rate,
            )
            model = hf.ViTForImageClassification(config)
            given = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(3, (2,))}
    return Loss(model.train(), tuple(given)), tuple(given.values())
