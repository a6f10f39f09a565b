"""A sample of the models and patterns of `make models`: three steps of training, equal to eager bit by bit."""

import pytest

from models.comparing import compare
from models.libraries import cases_of, missing

SAMPLE = {
    "nn": (
        "mlp",
        "convolutions",
        "lstm",
        "multihead_attention",
        "spectral_norm",
        "tied_weights",
        "checkpointed_blocks",
        "gradients_per_sample",
        "gradient_penalty",
        "sparse_embedding",
    ),
    "transformers": ("gpt2", "llama", "bert", "deberta-v2", "t5", "vit", "swin", "mamba", "mixtral", "qwen3"),
}


@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in SAMPLE.items() for name in names])
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_trains_as_in_eager(library, name):
    absent = missing(library)
    if absent:
        pytest.skip(f"{absent} is not installed")
    (case,) = [case for case in cases_of(library) if case.name == name]
    outcome = compare(case)
    assert outcome.verdict == "equal", outcome.reason
