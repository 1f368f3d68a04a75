"""What tools/sass.py reads from machine code."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import sass  # noqa: E402

# A loop with a rare case, which reads as many bytes one by one; a second loop over what is left.
LISTING = """
.text._Z6kernelv:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @P0 BRA `(.L_x_3) ;
.L_x_0:
        /*0020*/              @P1 BRA `(.L_x_1) ;
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.64 R8, desc[UR4][R2.64+0x10] ;
        /*0050*/                   FADD R0, R0, R4 ;
        /*0060*/                   LDG.E.64 R10, desc[UR4][R2.64+0x18] ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0080*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0090*/                   LDG.E.64 R6, desc[UR4][R2.64+0x8] ;
        /*00a0*/                   LDG.E.64 R8, desc[UR4][R2.64+0x10] ;
        /*00b0*/                   LDG.E.64 R10, desc[UR4][R2.64+0x18] ;
        /*00c0*/                   FADD R0, R0, R4 ;
        /*00c4*/                   FADD R0, R0, R5 ;
.L_x_2:
        /*00d0*/                   FADD R0, R8, R10 ;
        /*00e0*/                   STG.E.U16 desc[UR4][R2.64], R0 ;
        /*00f0*/              @P0 BRA `(.L_x_0) ;
.L_x_3:
        /*0100*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0110*/              @P0 BRA `(.L_x_3) ;
        /*0120*/                   EXIT ;
        /*0130*/                   NOP ;
"""


def test_the_innermost_loop_that_moves_most_is_looked_at_on_its_shortest_path():
    ((name, speed),) = sass.kernels(LISTING)
    assert name == "_Z6kernelv"
    # The two loads of 8 bytes wait together; the one of 16 was used before the second.
    assert speed == sass.Speed(instructions=20, path=9, read=32, written=2, in_flight=24)


def test_a_kernel_without_a_loop_is_one_path():
    listing = LISTING.replace("@P0 BRA `(.L_x_0)", "IADD3 R0, R0, R0")
    listing = listing.replace("@P0 BRA `(.L_x_3)", "IADD3 R0, R0, R0")
    ((_, speed),) = sass.kernels(listing)
    assert speed == sass.Speed(instructions=20, path=14, read=36, written=2, in_flight=24)
