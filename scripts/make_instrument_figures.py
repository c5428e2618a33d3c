"""Train the runs that docs/instruments.md shows, and make its pictures (about ten minutes on two cores).

    python scripts/make_instrument_figures.py [DIRECTORY]

Runs go to the directory (default: runs/instruments); finished ones are kept.

Pictures lie in docs/figures/; those of reports need Chromium (Debian: apt install chromium).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
RULES = ("none", "predictive")
SEEDS = range(3)
STEPS = 16
WIDTH = 1280


def predmask(*arguments: str) -> None:
    """Run the command line; its output is shown when it fails."""
    done = subprocess.run([sys.executable, "-m", "predmask", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"predmask {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def train(directory: Path, rule: str, seed: int) -> Path:
    """A run under stress with traces, on one thread."""
    path = directory / f"{rule}-{seed}"
    if not (path / "summary.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        options = ["--rule", rule, "--seed", str(seed), "--steps", str(STEPS), "--threads", "1", "--output", str(path)]
        predmask("train", "arithmetic-stress", "--traces", *options)
    return path


def photograph(page: Path, name: str, *, top: int, bottom: int) -> None:
    """A part of a page as a picture of up to 256 colours."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium: apt install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={WIDTH},{bottom}", "--hide-scrollbars", f"--screenshot={shot}"]
        command.append(page.resolve().as_uri())
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with Image.open(shot) as picture:
            part = picture.convert("RGB").crop((0, top, WIDTH, bottom)).quantize(256)
            part.save(FIGURES / name, optimize=True)
    print(f"wrote docs/figures/{name}")


def main() -> None:
    """Train what is missing, and draw everything."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/instruments")
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda each: train(directory, *each), [(rule, seed) for rule in RULES for seed in SEEDS]))
    masked, unmasked = (directory / f"{rule}-0" for rule in reversed(RULES))
    predmask("replay", str(masked), "--figure", str(FIGURES / "replay.svg"))
    predmask("compare", *map(str, runs), "--figure", str(FIGURES / "compare.svg"))
    for run in (masked, unmasked):
        predmask("report", str(run))
    photograph(masked / "report.html", "report.png", top=0, bottom=1500)
    photograph(masked / "report.html", "report-tokens.png", top=3275, bottom=4905)
    photograph(unmasked / "report.html", "report-unstable.png", top=0, bottom=1500)


if __name__ == "__main__":
    main()
