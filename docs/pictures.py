"""Take the picture of TensorBoard in docs/batch-size.md with Chromium, of a sweep of yours.

python docs/pictures.py outputs/sweeps/<sweep>
"""

import socket
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

SIZE = (1400, 1180)  # pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Serve the sweep's folder, wait until the page is drawn, and write docs/tensorboard.png."""
    browser = next(filter(None, map(which, BROWSERS)), None)
    if len(sys.argv) != 2 or browser is None:
        sys.exit(__doc__ if browser else f"none of {', '.join(BROWSERS)} is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "tensorboard.main", "--logdir", sys.argv[1], "--port", str(port)]
    server = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
    try:
        time.sleep(10)  # it reads the files meanwhile
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1"]
        flags += [f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=90000"]
        flags.append(f"--screenshot={Path(__file__).with_name('tensorboard.png')}")
        subprocess.run([browser, *flags, f"http://127.0.0.1:{port}/?smoothing=0#timeseries"], check=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
