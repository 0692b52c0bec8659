"""KV memory as pages of tokens: who holds which, and which full pages can be used again.

Pure bookkeeping; the tensors belong to the backend. A full page whose tokens are computed is
entered in an index under (adapter, preceding page, its tokens): a later sequence with the same
beginning takes the page instead of computing it. Pages nobody holds stay in the index until
their memory is needed, least recently used first, so the cache is bounded by the KV memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Tokens

PAGE = 32  # tokens

Key = tuple[int, int, tuple[int, ...]]  # adapter id or preceding node, depth, tokens of the page


class PagePool:
    """Pages 0 to n-1: free, held (counted), or cached (held by nobody, content still known)."""

    def __init__(self, pages: int, *, reuse: bool = True) -> None:
        self.pages = pages
        self.reuse = reuse
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._index: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._node: dict[int, int] = {}  # page -> number of its content, never used twice
        self._nodes = 0

    @property
    def available(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.pages - self.available

    def take(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing changed) when there are not that many."""
        if count > self.available:
            return None
        return [self._one() for _ in range(count)]

    def _one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def _forget(self, page: int) -> None:
        key = self._key.pop(page)
        del self._index[key], self._node[page]

    def release(self, pages: Tokens[int]) -> None:
        """Give pages back, those of the end first: a cut prefix is worth more than its tail."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} released twice"
            if self._holders[page]:
                continue
            if page in self._key:
                self._cached[page] = None
            else:
                self._free.append(page)

    def match(self, adapter: int, tokens: Tokens[int]) -> list[int]:
        """Known pages for the beginning of ``tokens``; nothing is taken yet.

        The last token is never covered: its hidden state must be computed to go on.
        """
        found: list[int] = []
        if not self.reuse:
            return found
        node = -1 - adapter
        for i in range((len(tokens) - 1) // PAGE):
            page = self._index.get((node, i, tuple(tokens[i * PAGE : (i + 1) * PAGE])))
            if page is None:
                break
            found.append(page)
            node = self._node[page]
        return found

    def hold(self, pages: Tokens[int]) -> None:
        """Take pages found by ``match``."""
        for page in pages:
            if not self._holders[page]:
                del self._cached[page]
            self._holders[page] += 1

    def evictable(self, pages: Tokens[int]) -> int:
        """How many of these pages nobody holds (holding them lowers ``available``)."""
        return sum(not self._holders[page] for page in pages)

    def enter(self, adapter: int, pages: Tokens[int], index: int, tokens: Tokens[int]) -> None:
        """Page ``index`` of a sequence is full and computed: let others use it.

        Its predecessor must be in the index; a page whose content is known already under
        another page stays private.
        """
        if not self.reuse or pages[index] in self._key:
            return
        node = -1 - adapter if index == 0 else self._node.get(pages[index - 1])
        if node is None:
            return
        key = (node, index, tuple(tokens[index * PAGE : (index + 1) * PAGE]))
        if key in self._index:
            return
        self._index[key] = pages[index]
        self._key[pages[index]] = key
        self._node[pages[index]] = self._nodes
        self._nodes += 1

    def drop(self, adapter: int) -> None:
        """Forget the first pages of an adapter that is gone; their followers age out."""
        for key, page in list(self._index.items()):
            if key[0] == -1 - adapter and not self._holders[page]:
                del self._cached[page]
                self._forget(page)
                self._free.append(page)
