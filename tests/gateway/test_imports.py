"""The gateway's process stays small: nothing of torch or transformers is ever imported."""

import subprocess
import sys


def test_importing_the_gateway_pulls_in_neither_torch_nor_transformers():
    code = (
        "import sys, services.gateway.__main__, services.gateway.service; "
        "bad = {'torch', 'transformers', 'peft', 'scipy'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
