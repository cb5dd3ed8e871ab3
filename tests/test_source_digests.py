"""Digests tell one set of sources from another."""

from jax_tilekern.compilation import source_digests


def test_digests_follow_the_sources(tmp_path):
    (tmp_path / "a.cuh").write_text("1")
    before = source_digests._digest(tmp_path.rglob("*.cuh"), tmp_path)
    assert source_digests._digest(tmp_path.rglob("*.cuh"), tmp_path) == before
    (tmp_path / "a.cuh").write_text("2")
    changed = source_digests._digest(tmp_path.rglob("*.cuh"), tmp_path)
    (tmp_path / "a.cuh").rename(tmp_path / "b.cuh")
    assert len({before, changed, source_digests._digest(tmp_path.rglob("*.cuh"), tmp_path)}) == 3
