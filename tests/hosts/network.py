"""Hosts on one machine: network namespaces on a bridge inside a namespace of their own.

``Network`` needs root and iproute2. Nothing of it is visible outside the namespaces it makes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

SUBNET = "10.77.0"


class Unavailable(RuntimeError):
    """Namespaces cannot be made here; says why."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """Hosts by name, each with an address of its own; the first also holds the bridge."""

    def __init__(self, *hosts: str) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise Unavailable("needs root and the `ip` command (iproute2)")
        self._prefix = f"collm{os.getpid()}"
        self._hosts = list(hosts)
        self._made: list[str] = []
        try:
            self._build()
        except Unavailable:
            self.close()
            raise

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._hosts.index(host) + 1}"

    def command(self, host: str, *command: str) -> list[str]:
        """A command line that runs there."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def _build(self) -> None:
        hub = self.namespace(self._hosts[0])
        for host in self._hosts:
            _run("ip", "netns", "add", self.namespace(host))
            self._made.append(self.namespace(host))
            self._in(host, "ip", "link", "set", "lo", "up")
        self._in(self._hosts[0], "ip", "link", "add", "bridge", "type", "bridge")
        self._in(self._hosts[0], "ip", "link", "set", "bridge", "up")
        self._in(self._hosts[0], "ip", "addr", "add", f"{SUBNET}.1/24", "dev", "bridge")
        for i, host in enumerate(self._hosts[1:], start=1):
            inside, outside = "eth0", f"port{i}"
            self._in(
                host,
                *("ip", "link", "add", inside, "type", "veth", "peer", "name", outside),
                *("netns", hub),
            )
            self._in(self._hosts[0], "ip", "link", "set", outside, "master", "bridge", "up")
            self._in(host, "ip", "addr", "add", f"{self.address(host)}/24", "dev", inside)
            self._in(host, "ip", "link", "set", inside, "up")

    def _in(self, host: str, *command: str) -> None:
        _run(*self.command(host, *command))

    def cut(self, host: str) -> None:
        """Pull the cable: no packet gets in or out, and nobody is told."""
        self._in(self._hosts[0], "ip", "link", "set", f"port{self._hosts.index(host)}", "down")

    def heal(self, host: str) -> None:
        self._in(self._hosts[0], "ip", "link", "set", f"port{self._hosts.index(host)}", "up")

    def drop(self, host: str, share: float) -> None:
        """Lose this share of the packets that come in there. Raises Unavailable."""
        if shutil.which("iptables") is None:
            raise Unavailable("dropping packets needs iptables")
        rule = ("-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        self._in(host, "iptables", "-A", "INPUT", *rule)

    def delay(self, host: str, milliseconds: int) -> None:
        """Each packet leaves so much later. Raises Unavailable where the kernel has no netem."""
        device = ("dev", "eth0", "root", "netem", "delay", f"{milliseconds}ms")
        self._in(host, "tc", "qdisc", "add", *device)

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
        self._made.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
