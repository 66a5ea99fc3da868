"""The additive mask lies where the model is; a tensor of torch's meta device shows it without a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from lynx_net.integrations import transformers  # noqa: E402  # needs torch


def test_the_mask_is_made_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = torch.ones(1, 1, 2, 4, dtype=torch.bool, device="meta")
    monkeypatch.setattr(transformers, "sdpa_mask", lambda *_, **__: allowed)
    mask = transformers._additive_mask(dtype=torch.bfloat16)
    assert mask is not None
    assert (mask.device.type, mask.dtype) == ("meta", torch.bfloat16)
