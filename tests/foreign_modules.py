"""What users put in the place of a model's parts."""

from torch import nn


class Wrap(nn.Module):
    """Around a module, with nothing of its attributes; `act` is called after it."""

    def __init__(self, module, act=None):
        super().__init__()
        self.wrapped = module
        self.act = act

    def forward(self, *args, **kwargs):
        result = self.wrapped(*args, **kwargs)
        if self.act is not None:
            self.act()
        return result


class ForeignBlock(Wrap):
    """A block of the user's own, which reads the rotary embedding that it is given."""

    def forward(self, *args, image_rotary_emb, **kwargs):
        cos, sin = image_rotary_emb
        return self.wrapped(*args, image_rotary_emb=(cos * 0.5, sin), **kwargs)


class HalvedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5
