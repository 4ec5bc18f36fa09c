"""Small models straight from other libraries with random weights, as "library:model", and the keywords of a call.

Run by `make test-libraries` in an environment of its own. The libraries are imported where a model is made, since the
compiled half of torchvision does not load beside torch for CPUs: its ops are given names,
which is all that importing it takes.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from tests.workers import PRELOAD

Built = tuple[nn.Module, dict[str, Any]]
if find_spec("timm") is not None:  # before anything imports torchvision, as transformers does, in a rank's process too
    _OPS = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _OPS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    if __name__ not in PRELOAD:
        PRELOAD.insert(0, __name__)


class _Positional(nn.Module):
    """A model that takes its arguments by position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        return self.model(*kwargs.values())


def _image(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(8, channels, size, size)


def _tokens(length: int = 8) -> torch.Tensor:
    return torch.randint(0, 32, (8, length))


def _made(where: str, *args: Any, given: tuple[torch.Tensor, ...], **kwargs: Any) -> Built:
    module, name = where.rsplit(".", 1)
    model = getattr(import_module(module), name)(*args, **kwargs)
    return _Positional(model), {f"x{i}": x for i, x in enumerate(given)}


def _timm(name: str, size: int = 64, **kwargs: Any) -> Built:
    return _made("timm.create_model", name, num_classes=8, given=(_image(size),), **kwargs)


def _lucid(name: str, **kwargs: Any) -> Built:
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 8, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
    return _made(f"vit_pytorch.{name}", given=(_image(),), **(sizes | kwargs))


def _text(**options: Any) -> Built:
    import_module("x_transformers")
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return _Positional(TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)), {"x": _tokens()}


def _lora(**options: Any) -> Built:
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    peft = import_module("peft")
    kind = options.pop("kind", "LoraConfig")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=2, use_cache=False))
    ids = _tokens()
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config), {"input_ids": ids, "labels": ids.clone()}


def _graph_net(name: str, **kwargs: Any) -> Built:
    edges = torch.randint(0, 16, (2, 48))
    given = (torch.randn(16, 8), edges)
    return _made(f"torch_geometric.nn.{name}", 8, given=given, **kwargs)


def _smp(name: str, encoder: str = "resnet18") -> Built:
    options = {"encoder_weights": None, "classes": 4, "encoder_name": encoder}
    return _made(f"segmentation_models_pytorch.{name}", given=(_image(64),), **options)


def _unet_2d(kind: str, *given: torch.Tensor, **kwargs: Any) -> Built:
    return _made(f"diffusers.{kind}", given=given, **kwargs)


_STEPS = torch.arange(8)
_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16}
_DIT = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 16, "patch_size": 4}
_FNO = {"in_channels": 3, "out_channels": 2, "hidden_channels": 16, "n_layers": 2}


def _monai(name: str, *args: Any, size: int = 32, **kwargs: Any) -> Built:
    return _made(f"monai.networks.nets.{name}", *args, given=(_image(size, 1),), **kwargs)


_TIMM = [
    "resnet18",
    "vit_tiny_patch16_224",
    "convnext_atto",
    "mobilenetv3_small_050",
    "efficientnet_b0",
    "regnetx_002",
    "mixer_s32_224",
    "densenet121",
    "deit_tiny_patch16_224",
    "ghostnet_050",
    "poolformer_s12",
    "edgenext_xx_small",
    "resmlp_12_224",
    "gmlp_ti16_224",
    "levit_128s",
    "repvgg_a0",
    "cait_xxs24_224",
    "xcit_nano_12_p16_224",
    "maxvit_rmlp_pico_rw_256",
    "coatnet_nano_rw_224",
    "mobilevit_xxs",
    "hrnet_w18_small",
    "dpn48b",
    "inception_v3",
    "fastvit_t8",
    "eva02_tiny_patch14_224",
]
_SIZED = ("vit", "mixer", "deit", "resmlp", "gmlp", "levit", "cait", "xcit", "coatnet", "eva02")
_TIMM_SIZES = {"levit_128s": 224, "inception_v3": 96, "maxvit_rmlp_pico_rw_256": 256, "eva02_tiny_patch14_224": 56}


def _of_timm(name: str) -> Built:
    size = _TIMM_SIZES.get(name, 64)
    options = {"img_size": size} if name.startswith(_SIZED) or "maxvit" in name else {}
    return _timm(name, size, **options)


MODELS: dict[str, Callable[[], Built]] = {
    **{f"timm:{name}": functools.partial(_of_timm, name) for name in _TIMM},
    "vit_pytorch:ViT": lambda: _lucid("ViT"),
    "vit_pytorch:SimpleViT": lambda: _lucid("SimpleViT"),
    "vit_pytorch:DeepViT": lambda: _lucid("deepvit.DeepViT"),
    "vit_pytorch:CaiT": lambda: _lucid("cait.CaiT", cls_depth=1),
    "vit_pytorch:ParallelViT": lambda: _lucid("parallel_vit.ViT", num_parallel_branches=2),
    "vit_pytorch:RegistersViT": lambda: _lucid("simple_vit_with_register_tokens.SimpleViT"),
    "x_transformers:Decoder": lambda: _text(),
    "x_transformers:rotary": lambda: _text(rotary_pos_emb=True, ff_glu=True),
    "x_transformers:alibi": lambda: _text(alibi_pos_bias=True, use_rmsnorm=True),
    "x_transformers:relative": lambda: _text(rel_pos_bias=True),
    "x_transformers:one key head": lambda: _text(attn_one_kv_head=True, ff_swish=True),
    "x_transformers:macaron": lambda: _text(macaron=True),
    "x_transformers:talking heads": lambda: _text(attn_pre_talking_heads=True),
    "x_transformers:sandwich": lambda: _text(sandwich_norm=True),
    "peft:LoRA": lambda: _lora(r=4, target_modules=["q_proj", "v_proj"]),
    "peft:DoRA": lambda: _lora(r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "peft:IA3": lambda: _lora(kind="IA3Config"),
    "peft:prefix": lambda: _lora(kind="PromptTuningConfig", num_virtual_tokens=4),
    "diffusers:UNet2DModel": lambda: _unet_2d(
        "UNet2DModel",
        _image(16),
        _STEPS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    ),
    "diffusers:UNet2DConditionModel": lambda: _unet_2d(
        "UNet2DConditionModel",
        _image(16, 4),
        _STEPS,
        torch.randn(8, 4, 16),
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    ),
    "diffusers:AutoencoderKL": lambda: _unet_2d(
        "AutoencoderKL", _image(16), block_out_channels=(16,), norm_num_groups=8, sample_size=16
    ),
    "diffusers:VQModel": lambda: _unet_2d("VQModel", _image(16), block_out_channels=(16,), norm_num_groups=8),
    "diffusers:DiTTransformer2DModel": lambda: _made(
        "diffusers.DiTTransformer2DModel",
        given=(_image(16, 4), _STEPS, _STEPS),
        in_channels=4,
        norm_num_groups=8,
        **_DIT,
    ),
    "torch_geometric:GCN": lambda: _graph_net("GCN", hidden_channels=16, num_layers=2, out_channels=4),
    "torch_geometric:GraphSAGE": lambda: _graph_net("GraphSAGE", hidden_channels=16, num_layers=2, out_channels=4),
    "torch_geometric:GIN": lambda: _graph_net("GIN", hidden_channels=16, num_layers=2, out_channels=4),
    "torch_geometric:GAT": lambda: _graph_net("GAT", hidden_channels=16, num_layers=2, out_channels=4),
    "neuraloperator:FNO": lambda: _made("neuralop.models.FNO", n_modes=(8, 8), given=(_image(16),), **_FNO),
    "neuraloperator:TFNO": lambda: _made("neuralop.models.TFNO", n_modes=(8, 8), given=(_image(16),), **_FNO),
    "monai:UNet": lambda: _monai("UNet", 2, 1, 4, (8, 16, 32), (2, 2)),
    "monai:AttentionUnet": lambda: _monai("AttentionUnet", 2, 1, 4, (8, 16, 32), (2, 2)),
    "monai:BasicUNet": lambda: _monai("BasicUNet", 2, 1, 4, (8, 8, 16, 16, 32, 8)),
    "monai:SegResNet": lambda: _monai("SegResNet", 2, 8, 1, 4),
    "monai:VNet": lambda: _monai("VNet", 2, 1, 4),
    "monai:UNETR": lambda: _monai("UNETR", 1, 4, 32, 8, 32, 64, 4, spatial_dims=2),
    "monai:DynUNet": lambda: _monai("DynUNet", 2, 1, 4, [3, 3, 3], [1, 2, 2], [2, 2]),
    "smp:Unet": lambda: _smp("Unet"),
    "smp:FPN": lambda: _smp("FPN"),
    "smp:Linknet": lambda: _smp("Linknet"),
    "smp:PSPNet": lambda: _smp("PSPNet"),
    "smp:DeepLabV3Plus": lambda: _smp("DeepLabV3Plus"),
    "smp:MAnet": lambda: _smp("MAnet"),
    "torchvision:resnet18": lambda: _made("torchvision.models.resnet18", num_classes=8, given=(_image(64),)),
    "torchvision:shufflenet": lambda: _made(
        "torchvision.models.shufflenet_v2_x0_5", num_classes=8, given=(_image(64),)
    ),
    "torchvision:swin_v2_t": lambda: _made("torchvision.models.swin_v2_t", num_classes=8, given=(_image(64),)),
    "torchvision:fcn_resnet50": lambda: _made(
        "torchvision.models.segmentation.fcn_resnet50", weights_backbone=None, num_classes=4, given=(_image(64),)
    ),
    "e3nn:Linear": lambda: _made("e3nn.o3.Linear", "8x0e + 4x1o", "8x0e + 4x1o", given=(torch.randn(8, 20),)),
    "open_clip:text and vision": lambda: _made(
        "open_clip.CLIP",
        embed_dim=32,
        vision_cfg={"layers": 2, "width": 64, "patch_size": 8, "image_size": 32},
        text_cfg={"context_length": 8, "vocab_size": 32, "width": 32, "heads": 4, "layers": 2},
        given=(_image(), _tokens()),
    ),
}


def build_of_library(name: str) -> Built:
    """The model called "library:model", in training mode without dropout, and the keywords of a call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, kwargs = MODELS[name]()
    for module in model.train().modules():
        if "drop" in type(module).__name__.lower():
            for rate in {"p", "drop_prob", "drop_rate"} & vars(module).keys():
                setattr(module, rate, 0.0)
    return model, kwargs
