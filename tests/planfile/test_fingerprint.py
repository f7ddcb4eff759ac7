"""A model's state is identified by names, shapes and dtypes, never by values."""

import torch
from torch import nn

from planner.planfile.fingerprint import same_class, state_digest


def _model(width: int = 4, **options: torch.dtype | str) -> nn.Module:
    layers = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    return layers.to(**options)  # type: ignore[call-overload, no-any-return]


def test_values_do_not_matter() -> None:
    digest = state_digest(_model())
    assert len(digest) == 64
    assert digest == state_digest(_model())


def test_no_data_is_read() -> None:
    assert state_digest(_model(device="meta")) == state_digest(_model())


def test_names_shapes_and_dtypes_matter() -> None:
    named = nn.Sequential()
    named.add_module("first", nn.Linear(4, 4))
    named.add_module("second", nn.BatchNorm1d(4))
    models = [_model(), _model(5), _model(dtype=torch.float64), named, nn.Sequential(), nn.Linear(4, 4)]
    assert len({state_digest(model) for model in models}) == len(models)


def test_state_that_is_no_tensor_and_lazy_parameters_have_a_digest() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"step": 3}

        def set_extra_state(self, state: object) -> None:
            pass

    assert state_digest(WithExtra(4, 4)) != state_digest(nn.Linear(4, 4))
    assert state_digest(nn.LazyLinear(4)) != state_digest(nn.Linear(4, 4))


def test_a_class_of_a_script_is_the_same_where_it_is_imported() -> None:
    names = ["__main__.Outer.Net", "__mp_main__.Outer.Net", "package.train.Outer.Net"]
    for planned in names[:2]:
        for found in names:
            assert same_class(planned, found)
            assert same_class(found, planned)
    assert not same_class(names[2], "package.other.Outer.Net")
    assert not same_class(names[0], "train.MyOuter.Net")
    assert not same_class(names[0], "__mp_main__.Net")
