"""How the features of transcoders, SAEs and cross-layer transcoders start: from tokens of a sample.

Feature n takes one token of the sample, with input x_n and output y_n, and means m_x, m_y and covariance C of the
inputs:

    w_enc[n] = s C^-1 (x_n - m_x) / |C^-1 (x_n - m_x)|      what tells this token's input from the others'
    w_dec[n] = (y_n - m_y) / |y_n - m_y|                     what the module wrote there
    b_enc[n] = -w_enc[n] . m_x,   b_dec = m_y

with one number s for all features, for which the kept features together fit the outputs of the sample best. Everything
happens on the scaled problem that training sees. Whitening matters: without it the encoders of frequent directions win
every token and many features stay silent.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.dictionaries.transcoder import Transcoder

RIDGE = 0.01  # share of the mean variance that is added to every direction of C before it is inverted
FITTED_ROWS = 4096  # tokens of the sample on which s is fitted


@torch.no_grad()
def initialise_features(module: Transcoder, x: Float[Tensor, "r d_in"], y: Float[Tensor, "r d_out"], seed: int) -> None:
    """Fill the weights of `module`, in place, from paired rows of its input and output (see the module's formulas).

    A skip connection starts at 0. With fewer rows than features, some rows start several features.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=generator)
    chosen = chosen.repeat(-(-module.n_units // len(x)))[: module.n_units]
    encoder, decoder = _features_of_tokens(x, y, chosen)
    module.W_enc.copy_(encoder)
    module.W_dec.copy_(decoder)
    module.b_dec.copy_(y.mean(0))
    module.b_enc.copy_(-module.W_enc @ x.mean(0))
    x, y = x[:FITTED_ROWS], y[:FITTED_ROWS]
    guess, target = module(x).y - module.b_dec, y - module.b_dec
    best = float((guess * target).sum() / guess.square().sum())
    if best > 0:
        module.W_enc *= best
        module.b_enc *= best


def _features_of_tokens(
    x: Float[Tensor, "r d_in"], y: Float[Tensor, "r d_out"], chosen: Tensor
) -> tuple[Float[Tensor, "n d_in"], Float[Tensor, "n d_out"]]:
    """Encoder and decoder rows of unit norm for the chosen tokens."""
    inputs, outputs = x - x.mean(0), y - y.mean(0)
    covariance = inputs.mT @ inputs / len(x)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean())
    white = torch.linalg.solve(covariance, inputs[chosen].mT).mT
    return F.normalize(white, dim=-1), F.normalize(outputs[chosen], dim=-1)
