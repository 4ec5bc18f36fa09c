from autopar.sbp.analysis.megatron_pairs import base_name, structure_of
from tests.planner.cases import traced


def kinds_by_module(name):
    graph = traced(name)
    kinds = structure_of(graph).kinds
    return {op.module: kinds[op.name] for op in graph.ops if op.name in kinds}


def test_products_pair_up():
    assert kinds_by_module("mlp") == {
        "blocks.0.0": "column",
        "blocks.0.2": "row",
        "blocks.1.0": "column",
        "blocks.1.2": "row",
        "head": "column",
    }


def test_patches_and_heads_stay_out_of_the_pairs():
    kinds = kinds_by_module("vit")
    assert [kind for module, kind in kinds.items() if "patch" in module] == ["whole"]
    assert kinds["classifier"] == "column"
    assert sum(kind == "row" for kind in kinds.values()) == 4  # two blocks: attention output and second product


def test_convolutions_pair_up():
    kinds = [kind for module, kind in kinds_by_module("vgg13").items() if module.startswith("features")]
    assert kinds == ["column", "row"] * 5


def test_region_is_between_the_products():
    graph = traced("gpt2")
    structure = structure_of(graph)
    inside = {base_name(op) for op in graph.ops if op.name in structure.region}
    assert {"scaled_dot_product_attention", "tanh"} <= inside
    assert not inside & {"layer_norm", "addmm", "linear", "cross_entropy_loss"}


def test_vocabulary_is_the_token_lookup():
    graph = traced("gpt2")
    lookups = [op.module for op in graph.ops if op.name in structure_of(graph).vocabulary]
    assert lookups == ["transformer.wte"]
    assert not structure_of(traced("mlp")).vocabulary
