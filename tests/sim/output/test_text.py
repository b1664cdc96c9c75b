"""Texts for people."""

from __future__ import annotations

from tierplan.sim.output.text import alike_rows


def test_rows_that_differ_in_a_number_alone_are_one() -> None:
    rows = [("what", "used"), ("gpu0 memory", "86 %"), ("gpu1 memory", "86 %"), ("host memory", "3 %")]
    assert alike_rows(rows) == [("what", "used"), ("gpu* memory", "86 %"), ("host memory", "3 %")]
    links = [("gpu0.p2p.gpu1", "1 %"), ("gpu1.p2p.gpu0", "1 %"), ("gpu0.h2d", "2 %"), ("gpu1.d2h", "2 %")]
    assert alike_rows(links) == [("gpu*.p2p.gpu*", "1 %"), ("gpu0.h2d", "2 %"), ("gpu1.d2h", "2 %")]
    uneven = [("gpu0", "86 %"), ("gpu1", "84 %"), ("gpu2", "84 %")]
    assert alike_rows(uneven) == uneven, "else nobody knows which"
