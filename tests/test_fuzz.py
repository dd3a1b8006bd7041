"""300 cases of the attack on every program, and a dozen kills; 3,000 and more by hand: fuzz.py."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("flags", [["--cases", "300"], ["--kills", "8"]], ids=["cases", "kills"])
def test_no_attack_brings_a_crash_a_loss_or_a_silence(flags):
    script = str(Path(__file__).with_name("fuzz.py"))
    done = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
