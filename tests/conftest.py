"""What holds for all tests."""

import signal
import sys
import threading
from pathlib import Path

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them all that they start.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Trainers are installed beside the other packages, without their dependencies, see the Makefile.
sys.path.append(str(Path(sys.prefix) / "trainers"))
