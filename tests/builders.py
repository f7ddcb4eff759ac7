"""The text of a file of builders, for the command line."""

BUILDERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = lambda: (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))
        self.layers = nn.Sequential(*layer(), *layer(), *layer(), *layer())
    def forward(self, x):
        return self.layers(x).square().mean()

def build():
    print("building")
    torch.manual_seed(0)
    return Net(), (torch.randn(64, 32),)

def build_two_layers():
    model, args = build()
    del model.layers[6:]
    return model, args

def build_in_evaluation():
    return Net().eval(), (torch.randn(64, 32),)

def build_output():
    return Net().layers, (torch.randn(64, 32),), {}

def mean(output):
    return output.mean()

def with_keywords():
    return Net(), [], {"x": torch.randn(64, 32)}

def raises():
    raise RuntimeError("no weights\\nto be found")

def leaves():
    raise SystemExit(7)

def returns_model():
    return Net()

def returns_no_module():
    return "Net", ()

def returns_number_as_args():
    return Net(), 3

def returns_bad_kwargs():
    return Net(), (), {1: 2}

number = 3
"""
