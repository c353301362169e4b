"""Layers that keep a state per sequence: Mamba, Mamba 2, gated delta nets and short convolutions.

Source: llama.cpp at commit 0c1e57098, src/models/mamba-base.cpp, delta-net-base.cpp, qwen35.cpp, qwen3next.cpp,
lfm2.cpp and `llm_graph_context::build_rs`.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvplan.servers.llamacpp.blocks import Blocks
from kvplan.servers.llamacpp.graph import Tensor, dims

Reader = Callable[[Tensor, Tensor], Tensor]


class States(NamedTuple):
    """Which slots' states a batch reads, and which it only moves."""

    main: Tensor
    extra: Tensor


class RecurrentBlocks(Blocks):
    """Blocks with recurrent layers."""

    def states(self) -> States:
        slots, seqs = self.context.slots, self.batch.seqs
        rows = self.input("I32", slots)
        return States(self.view(rows, dims(seqs), ()), self.view(rows, dims(slots - seqs), ()))

    def state(self, cache: Tensor, size: int, states: States, read: Reader | None = None) -> Tensor:
        """A state of each sequence: one is cleared, those in use are read, the others copied."""
        rows = self.reshape(cache, size, cache.ne[1])
        cleared = self.view(rows, dims(size), ())
        self.expand(self.like("SCALE", cleared, [cleared]))
        out = self.expand((read or self.get_rows)(rows, states.main))
        extra = self.get_rows(rows, states.extra)
        target = self.view(cache, dims(size, self.context.slots - self.batch.seqs), (cache.nb[1],))
        self.expand(self.copy(extra, target))
        return out

    def tokens_of(self, x: Tensor) -> Tensor:
        """The same tokens, by sequence."""
        return self.reshape(x, x.ne[0], self.batch.per_seq, self.batch.seqs)

    def convolved(self, layer: int, states: States, x: Tensor, channels: int, taps: int) -> Tensor:
        """The batch's values behind the last ones of each sequence, whose end becomes the new state."""
        seqs, cache = self.batch.seqs, self.cache("r", layer)
        old = self.reshape(self.state(cache, self.shape.conv_state, states), taps, channels, seqs)
        joined = self.concat(old, x)
        for _ in range(self.context.states):
            last = self.view(joined, dims(taps, channels, seqs), joined.nb[1:3])
            self.expand(self.copy(last, self.view(cache, dims(taps * channels, seqs), (cache.nb[1],))))
        return joined

    # --- Mamba ------------------------------------------------------------------------------------------------------

    def mamba(self, layer: int, x: Tensor, states: States) -> Tensor:
        shape, (per_seq, seqs) = self.shape, (self.batch.per_seq, self.batch.seqs)
        inner, size, rank, taps = shape.inner, shape.state, shape.dt_rank, shape.conv - 1
        cache = self.cache("r", layer)
        old = self.reshape(self.state(cache, shape.conv_state, states), taps, inner, seqs)
        both = self.mul_mat(self.of(layer, "ssm_in.weight"), self.tokens_of(x))
        half = dims(inner, *both.ne[1:3])
        x, z = self.view(both, half, both.nb[1:3]), self.view(both, half, both.nb[1:3])
        joined = self.concat(old, self.transpose(x))
        last = self.view(joined, dims(taps, inner, seqs), joined.nb[1:3])
        self.expand(self.copy(last, self.view(cache, dims(taps * inner * seqs), ())))
        x = self.ssm_conv(joined, self.of(layer, "ssm_conv1d.weight"))
        x = self.unary(self.add(x, self.of(layer, "ssm_conv1d.bias")))
        low = self.mul_mat(self.of(layer, "ssm_x.weight"), x)
        dt = self.cont(self.view(low, dims(rank, per_seq, seqs), low.nb[1:3]))
        b, c = (self.view(low, dims(size, 1, per_seq, seqs), (size * 4, *low.nb[1:3])) for _ in range(2))
        dt = self.add(self.mul_mat(self.of(layer, "ssm_dt.weight"), dt), self.of(layer, "ssm_dt.bias"))
        wide = self.reshape(x, 1, inner, per_seq, seqs)
        a, cached = self.of(layer, "ssm_a"), self.cache("s", layer)

        def scan(rows: Tensor, ids: Tensor) -> Tensor:
            return self.ssm_scan(self.reshape(rows, size, 1, inner, self.context.slots), wide, dt, a, b, c, ids)

        out = self.state(cached, shape.scan_state, states, scan)
        new = self.view(out, dims(size * inner * seqs), ())
        self.expand(self.copy(new, self.view(cached, dims(size * inner * seqs), ())))
        y = self.view(out, dims(inner, per_seq, seqs), (wide.nb[2], wide.nb[3]))
        y = self.add(y, self.mul(x, self.of(layer, "ssm_d")))
        y = self.glu(self.cont(z), y)
        y = self.mul_mat(self.of(layer, "ssm_out.weight"), y)
        return self.reshape(y, y.ne[0], per_seq * seqs)

    def mamba2(self, layer: int, x: Tensor, states: States) -> Tensor:
        shape, (per_seq, seqs) = self.shape, (self.batch.per_seq, self.batch.seqs)
        inner, size, heads, groups = shape.inner, shape.state, shape.dt_rank, shape.groups
        head, taps, channels = inner // heads, shape.conv - 1, inner + 2 * groups * size
        cache = self.cache("r", layer)
        old = self.reshape(self.state(cache, shape.conv_state, states), taps, channels, seqs)
        joint = self.mul_mat(self.of(layer, "ssm_in.weight"), x)
        joint = self.tokens_of(joint)
        z = self.view(joint, dims(head, heads, per_seq, seqs), (head * 4, *joint.nb[1:3]))
        mixed = self.view(joint, dims(channels, per_seq, seqs), joint.nb[1:3])
        dt = self.view(joint, dims(heads, per_seq, seqs), joint.nb[1:3])
        joined = self.concat(old, self.transpose(mixed))
        last = self.view(joined, dims(taps, channels, seqs), joined.nb[1:3])
        self.expand(self.copy(last, self.view(cache, dims(taps * channels, seqs), (cache.nb[1],))))
        mixed = self.ssm_conv(joined, self.of(layer, "ssm_conv1d.weight"))
        mixed = self.unary(self.add(mixed, self.of(layer, "ssm_conv1d.bias")))
        x = self.view(mixed, dims(head, heads, per_seq, seqs), (head * 4, *mixed.nb[1:3]))
        b, c = (self.view(mixed, dims(size, groups, per_seq, seqs), (size * 4, *mixed.nb[1:3])) for _ in range(2))
        dt = self.add(self.cont(dt), self.of(layer, "ssm_dt.bias"))
        a, cached = self.of(layer, "ssm_a"), self.cache("s", layer)

        def scan(rows: Tensor, ids: Tensor) -> Tensor:
            return self.ssm_scan(self.reshape(rows, size, head, heads, self.context.slots), x, dt, a, b, c, ids)

        out = self.state(cached, shape.scan_state, states, scan)
        width = size * inner
        new = self.view(out, dims(width, seqs, 1), (width * 4, width * 4 * seqs))
        target = self.view(cached, dims(width, seqs, 1), (cached.nb[1], self.context.slots * width * 4))
        self.expand(self.copy(new, target))
        y = self.view(out, dims(head, heads, per_seq, seqs), (x.nb[1], heads * x.nb[1], per_seq * heads * x.nb[1]))
        y = self.add(y, self.mul(x, self.of(layer, "ssm_d")))
        y = self.glu(self.cont(z), y)
        if (norm := self.maybe(layer, "ssm_norm.weight")) is not None:
            y = self.norm(self.reshape(y, inner // groups, groups, per_seq, seqs), norm, layer)
        y = self.reshape(y, inner, per_seq * seqs)
        return self.mul_mat(self.of(layer, "ssm_out.weight"), y)

    # --- gated delta nets -------------------------------------------------------------------------------------------

    def delta_layer(self, layer: int, x: Tensor, states: States) -> Tensor:
        """A gated delta net (Qwen3-Next, Qwen3.5)."""
        shape, (per_seq, seqs) = self.shape, (self.batch.per_seq, self.batch.seqs)
        k_dim, k_heads, v_heads = shape.state, shape.groups, shape.dt_rank
        v_dim, channels = shape.inner // v_heads, shape.inner + 2 * shape.groups * shape.state
        mixed, z, beta, gate = (self.packed_gates if shape.arch == "qwen3next" else self.separate_gates)(layer, x)
        joined = self.convolved(layer, states, self.transpose(mixed), channels, shape.conv - 1)
        cached = self.cache("s", layer)
        state = self.state(cached, shape.scan_state, states)
        state = self.reshape(state, v_dim, v_dim, v_heads, seqs)
        mixed = self.unary(self.ssm_conv(joined, self.of(layer, "ssm_conv1d.weight")))
        row = 4 * (2 * k_dim * k_heads + v_dim * v_heads)
        q, k = (
            self.scale(self.same("RMS_NORM", self.view(
                mixed, dims(k_dim, k_heads, per_seq, seqs), (k_dim * 4, row, row * per_seq)
            )))
            for _ in range(2)
        )  # fmt: skip
        v = self.view(mixed, dims(v_dim, v_heads, per_seq, seqs), (v_dim * 4, row, row * per_seq))
        if shape.arch == "qwen3next" and k_heads != v_heads:
            q, k = (self.spread(t, v_heads // k_heads) for t in (q, k))
        states_kept = self.context.states
        result = self.delta_net(q, k, v, gate, beta, state, states_kept)
        steps = v_dim * 4, v_dim * v_heads * 4, v_dim * v_heads * per_seq * 4
        output = self.view(result, dims(v_dim, v_heads, per_seq, seqs), steps)
        width, written = v_dim * v_dim * v_heads, min(per_seq, states_kept)
        new = self.view(result, dims(width, seqs, written), (width * 4, width * seqs * 4))
        into = self.view(cached, dims(width, seqs, written), (cached.nb[1], self.context.slots * width * 4))
        self.expand(self.copy(new, into))
        z = self.reshape(z, v_dim, v_heads, per_seq, seqs)
        normed = self.norm(output, self.of(layer, "ssm_norm.weight"), layer)
        out = self.mul(normed, self.unary(z))
        out = self.reshape(out, v_dim * v_heads, per_seq, seqs)
        out = self.mul_mat(self.of(layer, "ssm_out.weight"), out)
        return self.reshape(out, shape.hidden_size, per_seq * seqs)

    def separate_gates(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """QKV, z, beta and gate from a matrix each (Qwen3.5)."""
        heads, (per_seq, seqs) = self.shape.dt_rank, (self.batch.per_seq, self.batch.seqs)
        mixed = self.tokens_of(self.mul_mat(self.of(layer, "attn_qkv.weight"), x))
        z = self.mul_mat(self.of(layer, "attn_gate.weight"), x)
        beta = self.reshape(self.mul_mat(self.of(layer, "ssm_beta.weight"), x), 1, heads, per_seq, seqs)
        beta = self.unary(beta, "sigmoid")
        alpha = self.reshape(self.mul_mat(self.of(layer, "ssm_alpha.weight"), x), heads, per_seq, seqs)
        return mixed, z, beta, self.decay(layer, alpha)

    def decay(self, layer: int, alpha: Tensor) -> Tensor:
        alpha = self.unary(self.add(alpha, self.of(layer, "ssm_dt.bias")))
        gate = self.mul(alpha, self.of(layer, "ssm_a"))
        return self.reshape(gate, 1, self.shape.dt_rank, self.batch.per_seq, self.batch.seqs)

    def packed_gates(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """QKV and z from one matrix or two, beta and alpha from one (Qwen3-Next)."""
        shape, (per_seq, seqs) = self.shape, (self.batch.per_seq, self.batch.seqs)
        k_heads, heads, ratio = shape.groups, shape.dt_rank, shape.dt_rank // shape.groups
        if (joint := self.maybe(layer, "attn_qkv.weight")) is not None:
            mixed = self.tokens_of(self.mul_mat(joint, x))
            z = self.mul_mat(self.of(layer, "attn_gate.weight"), x)
        else:
            mixed, z = self.unpacked(layer, x)
        both = self.mul_mat(self.of(layer, "ssm_ba.weight"), x)
        both = self.reshape(both, 2 * ratio, k_heads, per_seq, seqs)
        b, a = (self.view(both, dims(ratio, k_heads, per_seq, seqs), both.nb[1:]) for _ in range(2))
        beta = self.unary(self.cont(b), "sigmoid")
        alpha = self.cont(a, heads, per_seq, seqs)
        gate = self.decay(layer, alpha)
        return mixed, z, self.reshape(beta, 1, heads, per_seq, seqs), gate

    def unpacked(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """QKV and z from the one matrix of older files."""
        shape, (per_seq, seqs) = self.shape, (self.batch.per_seq, self.batch.seqs)
        k_dim, k_heads, v_dim = shape.state, shape.groups, shape.inner // shape.groups
        packed = self.mul_mat(self.of(layer, "ssm_in.weight"), x)
        packed = self.reshape(packed, 2 * k_dim + 2 * v_dim, k_heads, per_seq, seqs)
        q, k, v, z = (
            self.view(packed, dims(size, k_heads, per_seq, seqs), packed.nb[1:])
            for size in (k_dim, k_dim, v_dim, v_dim)
        )
        z = self.cont(z)
        flat = [self.cont(t, t.ne[0] * k_heads, per_seq, seqs) for t in (q, k, v)]
        return self.concat(self.concat(flat[0], flat[1]), flat[2]), z

    def spread(self, x: Tensor, times: int) -> Tensor:
        """Each head so many times."""
        head, heads, per_seq, seqs = x.ne
        x = self.reshape(x, head, 1, heads, per_seq * seqs)
        x = self.repeat(x, head, times, heads, per_seq * seqs)
        return self.reshape(x, head, heads * times, per_seq, seqs)

    # --- short convolutions -----------------------------------------------------------------------------------------

    def short_conv(self, layer: int, x: Tensor, states: States) -> Tensor:
        """A gated convolution over a few tokens (LFM2)."""
        hidden = self.shape.hidden_size
        packed = self.mul_mat(self.of(layer, "shortconv.in_proj.weight"), self.tokens_of(x))
        third = dims(packed.ne[0] // 3, *packed.ne[1:3])
        b, c, x = (self.view(packed, third, packed.nb[1:3]) for _ in range(3))
        mixed = self.transpose(self.mul(b, x))
        joined = self.convolved(layer, states, mixed, hidden, self.shape.short_conv - 1)
        y = self.mul(c, self.ssm_conv(joined, self.of(layer, "shortconv.conv.weight")))
        y = self.mul_mat(self.of(layer, "shortconv.out_proj.weight"), y)
        return self.reshape(y, y.ne[0], self.batch.per_seq * self.batch.seqs)
