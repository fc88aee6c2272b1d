"""Which matrix product a decoder takes: it follows from the processor, and the record says which."""

from __future__ import annotations

import pytest
import torch
from conftest import decoder

from kvstages.models import packed_linear
from kvstages.models.packed_linear import packs, product, vendor

CPU = torch.device("cpu")


def test_fp32_is_packed_where_mkl_is_not_on_its_own_processors(monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert packs(torch.float32, CPU, "AuthenticAMD") and not packs(torch.float32, CPU, "GenuineIntel")
    assert not packs(torch.float64, CPU, "AuthenticAMD")
    assert not packs(torch.float32, torch.device("cuda"), "AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not packs(torch.float32, CPU, "AuthenticAMD")


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_is_packed_where_onednn_has_it(supported, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert packs(torch.bfloat16, CPU, "GenuineIntel") == packs(torch.bfloat16, CPU, "AuthenticAMD") == supported


@pytest.mark.parametrize("maker", ["AuthenticAMD", "GenuineIntel"])
def test_the_record_says_which(maker, monkeypatch):
    stated = {}
    monkeypatch.setattr("kvstages.models.gpt2_nano.vendor", lambda: maker)
    monkeypatch.setattr("kvstages.files.ledger.state", stated.update)
    model = decoder().pack()
    packed = packs(torch.float32, CPU, maker)
    parts = [model.lm_head, *(part for block in model.blocks for part in (block, block.mlp[0], block.mlp[2]))]
    assert {part.packed is not None for part in parts} == {packed}
    assert stated == {"product": product(torch.float32, CPU, packed)}


def test_the_maker_is_what_the_system_says(tmp_path, monkeypatch):
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n")
    monkeypatch.setattr(packed_linear, "Path", lambda _: listed)
    assert vendor() == "AuthenticAMD"
    listed.unlink()
    assert vendor()
