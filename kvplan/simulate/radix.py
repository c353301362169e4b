"""The prefix cache of SGLang: a radix tree of token ids whose least recently used leaves go first.

Rules as in SGLang 0.5.23 (mem_cache/unified_radix_cache.py, unified_cache/unified_tree_core.py): it keeps whole pages.
"""

from array import array
from dataclasses import field
from heapq import heapify, heappop, heappush
from itertools import count

from kvplan.core.records import dataclass


@dataclass(eq=False, slots=True)
class Node:
    """Tokens after those of its parent; locked while a request that runs needs them.

    children  by their first page
    """

    key: "array[int]"
    parent: "Node | None"
    used: float
    locks: int = 0
    children: "dict[bytes, Node]" = field(default_factory=dict)

    def __lt__(self, other: "Node") -> bool:
        return self.used < other.used


def common(a: "array[int]", b: "array[int]") -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low + (low < high and a[low] == b[low])


class Radix:
    """The radix tree; num_evictable: its tokens that are not locked."""

    def __init__(self, page_size: int = 1) -> None:
        self.page_size, self._clock = page_size, count(1)
        self.root = Node(array("q"), None, 0)
        self.root.locks = 1
        self.num_evictable = 0

    def whole(self, length: int) -> int:
        """Tokens of the whole pages among the first `length`."""
        return length - length % self.page_size

    def match(self, tokens: "array[int]") -> tuple[int, Node]:
        """Return the number of cached leading tokens and the node where they end; mark that path as used now."""
        node, length = self._walk(tokens, touches=False)
        used: float = next(self._clock)
        step: Node | None = node
        while step is not None:
            step.used, step = used, step.parent
            used -= 1e-5
        return length, node

    def insert(self, tokens: "array[int]") -> tuple[int, Node]:
        """Insert whole pages; return the tokens that were cached already and the node where all of them end."""
        tokens = tokens[: self.whole(len(tokens))]
        node, length = self._walk(tokens, touches=True)
        if length < len(tokens):
            leaf = Node(tokens[length:], node, next(self._clock))
            node.children[self._first(leaf.key)] = leaf
            self.num_evictable += len(leaf.key)
            return length, leaf
        return length, node

    def _walk(self, tokens: "array[int]", *, touches: bool) -> tuple[Node, int]:
        node, length, end = self.root, 0, self.whole(len(tokens))
        while length < end and (child := node.children.get(self._first(tokens, length))) is not None:
            if touches:
                child.used = next(self._clock)
            alike = self.whole(common(child.key, tokens[length : min(end, length + len(child.key))]))
            if alike < len(child.key):
                child = self._split(child, alike)
            node, length = child, length + alike
        return node, length

    def _split(self, child: Node, length: int) -> Node:
        assert child.parent is not None
        upper = Node(child.key[:length], child.parent, next(self._clock), child.locks)
        child.parent.children[self._first(upper.key)] = upper
        child.parent, child.key = upper, child.key[length:]
        upper.children[self._first(child.key)] = child
        child.used = next(self._clock)
        return upper

    def lock(self, node: Node) -> None:
        """Lock all tokens up to and including this node's."""
        while node.parent is not None:
            if not node.locks:
                self.num_evictable -= len(node.key)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                self.num_evictable += len(node.key)
            node = node.parent

    def evict(self, num_tokens: int) -> int:
        """Evict whole leaves, least recently used first, to free `num_tokens` tokens; return the number freed."""
        leaves = [node for node in self._nodes() if not node.children and not node.locks]
        heapify(leaves)
        freed = 0
        while leaves and freed < num_tokens:
            leaf = heappop(leaves)
            assert leaf.parent is not None
            del leaf.parent.children[self._first(leaf.key)]
            freed += len(leaf.key)
            if not leaf.parent.children and not leaf.parent.locks:
                heappush(leaves, leaf.parent)
        self.num_evictable -= freed
        return freed

    @property
    def num_tokens(self) -> int:
        """Tokens in the tree."""
        return sum(len(node.key) for node in self._nodes())

    def _first(self, tokens: "array[int]", start: int = 0) -> bytes:
        return tokens[start : start + self.page_size].tobytes()

    def _nodes(self) -> list[Node]:
        nodes, place = list(self.root.children.values()), 0
        while place < len(nodes):
            nodes.extend(nodes[place].children.values())
            place += 1
        return nodes
