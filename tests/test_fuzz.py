"""300 cases of the attack on every program; 3,000 by hand, see fuzz.py."""

import subprocess
import sys
from pathlib import Path


def test_no_attack_brings_a_crash_a_loss_or_a_silence():
    script = str(Path(__file__).with_name("fuzz.py"))
    done = subprocess.run([sys.executable, script, "--cases", "300"], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
