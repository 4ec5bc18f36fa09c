import pytest

from autopar.errors import AutoparError
from autopar.models import MODELS, build_model

# Published sizes in millions: the papers' tables, for gpt2 and llama3-8b the released checkpoints.
MILLIONS = {"gpt2": 124.4, "gpt2-xl": 1557.6, "llama3-8b": 8030.3, "bert-large": 335.2, "vit-l": 304.3, "vgg13": 133.0, "resnet50": 25.6}


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_the_published_size_and_no_memory(name):
    example = build_model(name)
    assert sum(p.numel() for p in example.model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], abs=0.06)
    tensors = [*example.model.parameters(), *example.args, *(x for x in example.kwargs.values() if hasattr(x, "is_meta"))]
    assert all(x.is_meta for x in tensors)


def test_unknown_models_are_named_with_the_known():
    with pytest.raises(AutoparError, match=r"'gpt5'.*gpt2-xl"):
        build_model("gpt5")
