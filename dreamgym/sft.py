"""One supervised step on token samples: what training the experience model and imitating demonstrations
share.

    values = sft_step(model, my_samples, optimizers, micro_batch_tok=8192, dist=dist)

Left out on purpose: which samples (the scripts draw them) and the learning rate (tiny.set_rate).
"""
import torch

from dreamgym.losses import aggregate, check_finite, sft_loss
from dreamgym.logprobs import TrainSample, even_micro_batches, token_logprobs
from dreamgym.model import optimizer_step


def sft_step(model: torch.nn.Module, samples: list[TrainSample], optimizers: list[torch.optim.Optimizer],
             micro_batch_tok: int, dist) -> dict:
    """Minimizes the mean of -log p over the trained tokens of all ranks' samples (DreamGym, Eq. 5).

    Every rank calls it with its own share of `samples`, which may be empty. `dist` is a run.Dist. Returns the
    loss, the gradient norm before clipping, and the trained tokens of all ranks. Raises ValueError where no
    token is trained, FloatingPointError where loss or gradient is not finite.
    """
    tokens = dist.all_reduce_sum(float(sum(sum(sample.mask) for sample in samples)))
    loss_sum = 0.0
    for indices in even_micro_batches(samples, micro_batch_tok, dist):
        logp_N = token_logprobs(model, [samples[i] for i in indices], with_entropy=False)[0]
        loss = aggregate(sft_loss(logp_N), tokens / dist.world_size)   # gradients are averaged over ranks
        check_finite(loss, f"supervised loss of samples {indices}")
        loss.backward()
        loss_sum += loss.item() / dist.world_size
    norm = optimizer_step(model.parameters(), optimizers, dist)
    return {"loss": dist.all_reduce_sum(loss_sum), "grad_norm": norm, "tokens": tokens}
