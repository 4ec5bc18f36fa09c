"""Vision models as people write them: segmentation, detection, rendering."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.written.draws import BATCH, Built, ids, image, mlp, rows, some


def conv_block(n: int, m: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skip connections by concatenation; cross-entropy and a soft dice loss over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = conv_block(3, 8), conv_block(8, 16), conv_block(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.out2, self.out1, self.head = conv_block(32, 16), conv_block(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.out2(torch.cat([self.up2(c), b], 1))
        logits = self.head(self.out1(torch.cat([self.up1(b), a], 1)))
        hot = F.one_hot(target, 4).permute(0, 3, 1, 2).to(logits.dtype)
        p = logits.softmax(1)
        dice = 2 * (p * hot).sum((0, 2, 3)) / (p + hot).sum((0, 2, 3)).clamp(min=1e-6)
        return F.cross_entropy(logits, target) + 1 - dice.mean()


class SSD(nn.Module):
    """Class and box heads on two maps; smooth L1 over positives, both divided by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = conv_block(3, 16, 2), conv_block(16, 32, 2)
        self.classes = nn.ModuleList([nn.Conv2d(n, 3 * 4, 3, padding=1) for n in (16, 32)])
        self.boxes = nn.ModuleList([nn.Conv2d(n, 3 * 4, 3, padding=1) for n in (16, 32)])

    def forward(self, x: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
        a = self.body(x)
        maps = [a, self.more(a)]
        logits = torch.cat([h(m).permute(0, 2, 3, 1).reshape(len(x), -1, 4) for h, m in zip(self.classes, maps)], 1)
        found = torch.cat([h(m).permute(0, 2, 3, 1).reshape(len(x), -1, 4) for h, m in zip(self.boxes, maps)], 1)
        positive = classes > 0
        number = positive.sum().clamp(min=1)
        box = F.smooth_l1_loss(found[positive], boxes[positive], reduction="sum") / number
        loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
        negative = loss.masked_fill(positive, 0.0).sort(1, descending=True)[0][:, :16]  # hard negatives
        return box + (loss[positive].sum() + negative.sum()) / number


class CenterNet(nn.Module):
    """The penalty-reduced focal loss of heat maps, and offsets read at the centres of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_block(3, 16, 2), conv_block(16, 16))
        self.heat, self.size = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor, heat: Tensor, where: Tensor, size: Tensor, mask: Tensor) -> Tensor:
        y = self.body(x)
        p = self.heat(y).sigmoid().clamp(1e-4, 1 - 1e-4)
        is_centre = heat.eq(1).to(p.dtype)
        positive = (p.log() * (1 - p) ** 2 * is_centre).sum()
        negative = ((1 - p).log() * p**2 * (1 - heat) ** 4 * (1 - is_centre)).sum()
        found = self.size(y).flatten(2).transpose(1, 2).gather(1, where.unsqueeze(2).expand(-1, -1, 2))
        weight = mask.unsqueeze(2).expand_as(found).to(p.dtype)
        regression = F.l1_loss(found * weight, size * weight, reduction="sum") / (weight.sum() + 1e-4)
        return -(positive + negative) / is_centre.sum().clamp(min=1) + 0.1 * regression


class DETR(nn.Module):
    """Object queries; each target is matched to the query of the least cost, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.queries = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(6, 32))
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(32, 5), mlp(32, 32, 4)

    def forward(self, x: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        memory = self.body(x).flatten(2).transpose(1, 2)
        y = self.transformer(memory, self.queries.expand(len(x), -1, -1))
        logits, found = self.classes(y), self.boxes(y).sigmoid()
        with torch.no_grad():
            p = logits.softmax(-1)
            cost = torch.cdist(found, boxes, p=1) - p.gather(2, labels.unsqueeze(1).expand(-1, p.shape[1], -1))
            match = cost.argmin(1)
        sample = torch.arange(len(x), device=x.device).unsqueeze(1)
        target = torch.full(logits.shape[:2], 4, dtype=torch.long, device=x.device)
        target[sample, match] = labels
        box = (found[sample, match] - boxes).abs().sum() / labels.numel()
        return F.cross_entropy(logits.transpose(1, 2), target) + 5 * box


class Deformable(nn.Module):
    """Offsets of a sampling grid from a convolution, then grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.body = nn.Conv2d(3, 2, 3, padding=1), conv_block(3, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        n, _, h, w = x.shape
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack([xs, ys], -1).to(x).expand(n, -1, -1, -1)
        moved = grid + 0.1 * self.offset(x).permute(0, 2, 3, 1).tanh()
        y = F.grid_sample(x, moved, align_corners=True, padding_mode="border")
        return F.cross_entropy(self.head(self.body(y).mean((2, 3))), target)


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(conv_block(3, 8, 4), nn.Flatten(), nn.Linear(8 * 16, 6))
        self.register_buffer("identity", torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.body, self.head = conv_block(3, 16, 2), nn.Linear(16 * 64, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        theta = (self.where(x) * 0.1 + self.identity).view(-1, 2, 3)
        x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        return F.nll_loss(F.log_softmax(self.head(self.body(x).flatten(1)), -1), target)


class Capsules(nn.Module):
    """Dynamic routing by agreement, the margin loss and a reconstruction masked by the right capsule."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Conv2d(3, 32, 4, 4), nn.Parameter(0.1 * torch.randn(64, 8, 8, 16))
        self.decoder = mlp(8 * 16, 64, 48)

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        norm = s.square().sum(-1, keepdim=True)
        return norm / (1 + norm) * s / (norm + 1e-8).sqrt()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        u = self.squash(self.body(x).reshape(len(x), 64, 8))
        votes = torch.einsum("bni,nioj->bnoj", u, self.weight)
        logits = torch.zeros(votes.shape[:3], dtype=x.dtype, device=x.device)
        for _ in range(3):
            v = self.squash((logits.softmax(2).unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * v.unsqueeze(1)).sum(-1)
        length, hot = v.norm(dim=-1), F.one_hot(target, 8).to(x.dtype)
        margin = hot * F.relu(0.9 - length) ** 2 + 0.5 * (1 - hot) * F.relu(length - 0.1) ** 2
        whole = self.decoder((v * hot.unsqueeze(-1)).flatten(1))
        return margin.sum(1).mean() + 0.01 * F.mse_loss(whole, F.adaptive_avg_pool2d(x, 4).flatten(1))


class FPN(nn.Module):
    """Levels added after interpolation, one head for all of them, whose outputs are a list."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([conv_block(3, 8, 2), conv_block(8, 16, 2), conv_block(16, 32, 2)])
        self.sides = nn.ModuleList([nn.Conv2d(n, 16, 1) for n in (8, 16, 32)])
        self.head = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 4, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for level in self.levels:
            x = level(x)
            maps.append(x)
        top = self.sides[2](maps[2])
        found = [self.head(top)]
        for side, y in zip([self.sides[1], self.sides[0]], [maps[1], maps[0]]):
            top = side(y) + F.interpolate(top, size=y.shape[-2:], mode="bilinear", align_corners=False)
            found.append(self.head(top))
        return found


class ConvLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(2 + 8, 32, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, frames: Tensor) -> Tensor:
        n, time, _, h, w = frames.shape
        state, cell = frames.new_zeros(n, 8, h, w), frames.new_zeros(n, 8, h, w)
        loss = frames.new_zeros(())
        for t in range(time - 1):
            i, f, o, g = self.gates(torch.cat([frames[:, t], state], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            loss = loss + F.mse_loss(self.head(state), frames[:, t + 1])
        return loss / (time - 1)


class SuperResolution(nn.Module):
    """Convolutions with weight_norm, pixel_shuffle, the Charbonnier and a total variation loss."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.body = nn.Sequential(
            norm(nn.Conv2d(3, 16, 3, padding=1)), nn.PReLU(16), norm(nn.Conv2d(16, 12, 3, padding=1))
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = F.pixel_shuffle(self.body(x), 2)
        variation = (y[..., 1:] - y[..., :-1]).abs().mean() + (y[..., 1:, :] - y[..., :-1, :]).abs().mean()
        return ((y - target) ** 2 + 1e-6).sqrt().mean() + 0.1 * variation


class Style(nn.Module):
    """Gram matrices of features against those of a style image, features frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.features = nn.Sequential(conv_block(3, 8), nn.Conv2d(8, 3, 1)), conv_block(3, 16, 2)
        self.features.requires_grad_(False).eval()

    @staticmethod
    def gram(f: Tensor) -> Tensor:
        f = f.flatten(2)
        return f @ f.mT / (f.shape[1] * f.shape[2])

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        y = self.features(self.net(x))
        with torch.no_grad():
            wanted, content = self.gram(self.features(style)), self.features(x)
        return F.mse_loss(self.gram(y), wanted) * 100 + F.mse_loss(y, content)


class RadianceField(nn.Module):
    """NeRF: sines and cosines of positions, an MLP with a skip, transmittance by cumprod."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(3 + 24, 32, 32), mlp(32 + 27, 32, 4)

    def forward(self, origin: Tensor, direction: Tensor, colour: Tensor) -> Tensor:
        t = torch.linspace(0.1, 2.0, 12, device=origin.device, dtype=origin.dtype)
        points = origin[:, None] + t[None, :, None] * F.normalize(direction, dim=-1)[:, None]
        angles = points[..., None] * 2.0 ** torch.arange(4, device=points.device)
        code = torch.cat([points, angles.sin().flatten(2), angles.cos().flatten(2)], -1)
        out = self.second(torch.cat([self.first(code), code], -1))
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) * (t[1] - t[0]))
        before = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return F.mse_loss(((alpha * before)[..., None] * out[..., :3].sigmoid()).sum(1), colour)


class MaskedAutoencoder(nn.Module):
    """Patches shuffled by argsort of given noise, half kept; mean loss over those left out."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.position = nn.Linear(48, 32), nn.Parameter(torch.randn(1, 16, 32))
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.decoder, self.token = nn.Linear(32, 48), nn.Parameter(torch.zeros(1, 1, 32))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        n = len(x)
        patches = x.reshape(n, 3, 4, 4, 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(n, 16, 48)
        shuffle = noise.argsort(1)
        restore, keep = shuffle.argsort(1), shuffle[:, :8]
        tokens = self.patches(patches) + self.position
        seen = self.encoder(tokens.gather(1, keep[..., None].expand(-1, -1, 32)))
        whole = torch.cat([seen, self.token.expand(n, 8, -1)], 1).gather(1, restore[..., None].expand(-1, -1, 32))
        mask = torch.ones(n, 16, device=x.device, dtype=x.dtype)
        mask[:, :8] = 0
        mask = mask.gather(1, restore)
        loss = (self.decoder(whole) - patches).square().mean(-1)
        return (loss * mask).sum() / mask.sum()


class Windows(nn.Module):
    """Attention in shifted windows with a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Conv2d(3, 32, 2, 2), nn.Linear(32, 96), nn.Linear(32, 32)
        self.table, self.head = nn.Parameter(torch.randn(49, 4)), nn.Linear(32, 8)
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]) + 3
        self.register_buffer("index", apart[0] * 7 + apart[1])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = torch.roll(self.embed(x).permute(0, 2, 3, 1), (-2, -2), (1, 2))
        n = len(y)
        w = y.view(n, 2, 4, 2, 4, 32).permute(0, 1, 3, 2, 4, 5).reshape(n * 4, 16, 32)
        q, k, v = self.qkv(w).view(n * 4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(16, 16, 4).permute(2, 0, 1)
        a = (q @ k.transpose(-2, -1) * 8**-0.5 + bias).softmax(-1) @ v
        w = self.out(a.transpose(1, 2).reshape(n * 4, 16, 32))
        y = w.view(n, 2, 2, 4, 4, 32).permute(0, 1, 3, 2, 4, 5).reshape(n, 8, 8, 32)
        y = torch.roll(y, (2, 2), (1, 2)) + self.embed(x).permute(0, 2, 3, 1)
        return F.cross_entropy(self.head(y.mean((1, 2))), target, label_smoothing=0.1)


class SqueezeExcite(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard swish, a focal loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = conv_block(3, 16, 2), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.gate, self.head = nn.BatchNorm2d(16), mlp(16, 4, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.deep(self.stem(x))))
        y = y * F.hardsigmoid(self.gate(y.mean((2, 3))))[..., None, None]
        ce = F.cross_entropy(self.head(F.adaptive_max_pool2d(y, 1).flatten(1)), target, reduction="none")
        return ((1 - (-ce).exp()) ** 2 * ce).mean()


class Yolo(nn.Module):
    """Anchors in a view of five dims; losses of boxes of cells with an object, picked by a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(conv_block(3, 16, 2), conv_block(16, 16, 2)), nn.Conv2d(16, 2 * 9, 1)
        self.register_buffer("anchors", torch.tensor([[1.0, 2.0], [2.0, 1.0]]).view(1, 2, 1, 1, 2))

    def forward(self, x: Tensor, has_object: Tensor, boxes: Tensor, classes: Tensor) -> Tensor:
        n, _, h, w = (y := self.head(self.body(x))).shape
        y = y.view(n, 2, 9, h, w).permute(0, 1, 3, 4, 2).contiguous()
        xy, wh = y[..., :2].sigmoid(), y[..., 2:4].clamp(max=4).exp() * self.anchors
        found = torch.cat([xy, wh], -1)[has_object]
        overlap = torch.minimum(found[:, 2:], boxes[has_object][:, 2:]).prod(1)
        union = found[:, 2:].prod(1) + boxes[has_object][:, 2:].prod(1) - overlap
        box = (1 - overlap / union).mean() + F.mse_loss(found[:, :2], boxes[has_object][:, :2])
        seen = F.binary_cross_entropy_with_logits(y[..., 4], has_object.to(y.dtype), pos_weight=y.new_tensor([2.0]))
        return box + seen + F.cross_entropy(y[..., 5:][has_object], classes[has_object])


class Siamese(nn.Module):
    """BYOL: a target network with parameters that are buffers, negative cosine, stop gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = (
            nn.Sequential(conv_block(3, 8, 4), nn.Flatten(), nn.Linear(128, 16)),
            mlp(16, 32, 16),
        )
        self.target = nn.Sequential(conv_block(3, 8, 4), nn.Flatten(), nn.Linear(128, 16)).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), wanted.detach(), dim=-1).mean()


class BarlowTwins(nn.Module):
    """The cross-correlation of two views, normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_block(3, 8, 4), nn.Flatten(), nn.Linear(128, 12), nn.BatchNorm1d(12, affine=False)
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        c = self.body(a).T @ self.body(b) / len(a)
        diagonal = torch.diagonal(c).add_(-1).pow_(2).sum()
        n = c.shape[0]
        rest = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow(2).sum()
        return diagonal + 0.01 * rest


def _yolo() -> Built:
    boxes = torch.rand(BATCH, 2, 4, 4, 4)
    return Yolo(), {"x": image(), "has_object": some(2, 4, 4, share=0.3), "boxes": boxes, "classes": ids(2, 4, 4, of=4)}


MODELS = {
    "unet": lambda: (UNet(), {"x": image(), "target": ids(16, 16, of=4)}),
    "ssd": lambda: (SSD(), {"x": image(), "classes": ids(240, of=8).sub(4).clamp(0), "boxes": rows(240, 4)}),
    "centernet": lambda: (
        CenterNet(),
        {
            "x": image(),
            "heat": torch.where(some(4, 8, 8, share=0.1), 1.0, 0.4),
            "where": ids(3, of=64),
            "size": rows(3, 2),
            "mask": some(3),
        },
    ),
    "detr": lambda: (DETR(), {"x": image(), "labels": ids(3, of=4), "boxes": torch.rand(BATCH, 3, 4)}),
    "deformable": lambda: (Deformable(), {"x": image(), "target": ids(of=8)}),
    "spatial-transformer": lambda: (SpatialTransformer(), {"x": image(), "target": ids(of=8)}),
    "capsules": lambda: (Capsules(), {"x": image(), "target": ids(of=8)}),
    "fpn": lambda: (FPN(), {"x": image()}),
    "conv-lstm": lambda: (ConvLSTM(), {"frames": rows(4, 2, 8, 8)}),
    "super-resolution": lambda: (SuperResolution(), {"x": image(), "target": image(32)}),
    "style": lambda: (Style(), {"x": image(), "style": image()}),
    "nerf": lambda: (RadianceField(), {"origin": rows(3), "direction": rows(3), "colour": rows(3)}),
    "mae": lambda: (MaskedAutoencoder(), {"x": image(), "noise": torch.rand(BATCH, 16)}),
    "windows": lambda: (Windows(), {"x": image(), "target": ids(of=8)}),
    "squeeze-excite": lambda: (SqueezeExcite(), {"x": image(), "target": ids(of=8)}),
    "yolo": _yolo,
    "byol": lambda: (Siamese(), {"a": image(), "b": image()}),
    "barlow-twins": lambda: (BarlowTwins(), {"a": image(), "b": image()}),
}
