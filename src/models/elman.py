"""An Elman network over a whole sequence on a CPU, faster than step-by-step autograd.

One matrix product applies the input weights to all steps. One buffer holds the state of every step, where the next step
and the backward pass read it. Weight gradients are products over a block of steps that is still in the cache, instead
of one small product a step.

Shapes: B sequences in a batch, T steps, F input features, H hidden units.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_SIZE = 16  # steps whose gradients are kept for one product
_NEGLIGIBLE = 1e-30  # smaller gradients become denormal in float32, which makes a processor some 100 times slower

_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class ElmanSequence(torch.autograd.Function):
    """`h[t] = tanh(W_ih x[t] + b_ih + W_hh h[t−1] + b_hh)` for all t; differentiable once.

    `apply(x, hidden, w_ih, w_hh, b_ih, b_hh)` takes `x: (T, B, F)` and `hidden: (B, H)`, and returns all states
    `(T, B, H)` and the last one `(B, H)`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute one product for the inputs of all steps; then a product and a tanh for each step, in place."""
        x = x.contiguous()
        steps, batch, features = x.shape
        states = x.new_empty(steps + 1, batch, len(hidden[0]))  # from the initial state on
        states[0] = hidden
        torch.addmm(b_ih + b_hh, x.view(-1, features), w_ih.t(), out=states[1:].flatten(0, 1))
        transposed = w_hh.t().contiguous()
        state = states.unbind(0)
        for t in range(steps):
            state[t + 1].addmm_(state[t], transposed).tanh_()
        ctx.save_for_backward(x, states, w_ih, w_hh)
        return states[1:], states[-1].clone()

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  # once_differentiable has no types
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Backpropagate through time block by block; only one block of gradients exists at a time."""
        grad_states, grad_last = grad_outputs
        x, states, w_ih, w_hh = ctx.saved_tensors
        steps, batch, _ = x.shape
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w_ih, grad_w_hh, grad_bias = torch.zeros_like(w_ih), torch.zeros_like(w_hh), w_ih.new_zeros(len(w_ih))
        block = x.new_empty(_BLOCK_SIZE, batch, len(w_hh))  # gradients of the arguments of tanh
        grad, grad_state, state, inner = grad_last.clone(), grad_states.unbind(0), states.unbind(0), block.unbind(0)
        for end in range(steps, 0, -_BLOCK_SIZE):
            start = max(0, end - _BLOCK_SIZE)
            for t in range(end - 1, start - 1, -1):
                grad += grad_state[t]
                _tanh_backward(grad, state[t + 1], grad_input=inner[t - start])
                if t or ctx.needs_input_grad[1]:  # the gradient of a default initial state is not needed
                    torch.mm(inner[t - start], w_hh, out=grad)
            grad.masked_fill_(grad.abs() < _NEGLIGIBLE, 0)
            flat_grad = block[: end - start].flatten(0, 1)
            grad_w_ih.addmm_(flat_grad.t(), x[start:end].flatten(0, 1))
            grad_w_hh.addmm_(flat_grad.t(), states[start:end].flatten(0, 1))
            grad_bias += flat_grad.sum(0)
            if grad_x is not None:
                torch.mm(flat_grad, w_ih, out=grad_x[start:end].flatten(0, 1))
        return grad_x, grad if ctx.needs_input_grad[1] else None, grad_w_ih, grad_w_hh, grad_bias, grad_bias.clone()
