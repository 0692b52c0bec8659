"""The words of docs/evaluation/README.md; ``page.write`` fills in the numbers."""

TEXT = """# Evaluation by simulation

Written by `make figures` on {date}. Everything on this page is simulated on virtual time with the
dispatcher's own policies, unless it says otherwise: {replicas} replicas with profile `{profile}`
(derived from published figures, not measured), {hours:g} hours of {source}, {seeds} seed(s) (with
several: mean ± half the range). 1x = {unit:.2f} times the recorded rate; 4x is 1.1 times the load
at which round robin's attainment falls under 90 % of an idle cluster's, on the same requests.
SLO: code 0.5 s end to end; conversation 1 s to the first token and 50 ms a token. Quality comes
from the loss curve `{curve}` (see `config/curves`; `python -m sim.fit_curve` fits one to a real
run); the baselines serve the initial adapter and never train. How far a simulation can be trusted
is measured by `python -m bench.sim` (docs/performance.md). What this page shows, and what it
misses against the paper: [findings.md](findings.md).

## Load (paper: Fig. 1)
![Requests a second](load.png)

## Goodput by policy (Fig. 10)
![Goodput](goodput_tokens_per_s.png)

{goodput}

Attainment:

{attainment}

![Attainment](slo_attainment.png)

Ours over each baseline, by task; a ratio below 1 is a miss:

{ratios}

Against the fluid bound min(offered, what all replicas could carry):

{bounds}

## Q-goodput by policy (Fig. 10)
![Q-goodput](q_goodput.png)

{q_goodput}

## Time to first token (Fig. 4)
![p99 TTFT](p99_ttft_ms.png)

{ttft}

The policy `collm` lets hopeless requests wait behind all others (best effort), so its p99 over all
requests under overload is the waiting of those it gave up, not of those it served in time.

## Utilisation and training (Fig. 11a)
![Utilisation](utilisation.png)

{training}

The paper reports about 30 % of compute training at 1x and none at 4x on the conversation trace.

## Memory (Fig. 11b)
![Memory](memory.png)

Computed from published sizes for `h20-8b` (two GPUs), not measured; what sharing costs on real
replicas is measured by `make bench-sharing`.

| | GB | of that weights | KV |
|---|---|---|---|
{memory}

The paper reports +20 GB (50 %) for a second copy of a 7B model.

## Pacing (Fig. 5 and 13)
![Served a second](served.png)

Relative variance (variance / mean²) of requests ended a second at 2x, collm / round robin: on the
fullest replica {pacing_fullest:.2f} (aim: at most 1/3), median over the replicas {pacing:.2f}. The
pacing policy fills the first replicas and leaves the peaks to the last ones, which therefore serve
less evenly than round robin's. In real time: `python -m bench.pacing`.

## Quality over time (Fig. 3 and 12a)
![Quality](quality.png)

Share of answers with a quality above 1 at 2x (paper: over 80 % with sharing, 40 % with separate
training, under 10 % without):

| | above 1 |
|---|---|
{above}

## Batch pairs against the coordinator (Fig. 12b)
{pairs}

Time to the cross-entropy that all of them reach, the coordinator's = 1 (paper: (16, 4) 1.63,
(4, 16) 1.58): {jct}

## Shared replicas against the isolated design at 2x (Fig. 2; v2 reports up to 3x goodput)
{split}

The isolated design serves the version of a session only when that session has ended.

## Fit of the latency model (Fig. 9)
![Iterations](fit.png)

The coordinator's own fit on what the simulated replicas report (5 % jitter). It shows what the
second variable explains, not how well hardware follows the model. Paper: the one-variable fit
falls from 0.994 to 0.758 beside training.

| | samples | R² in b and B | R² in b alone |
|---|---|---|---|
{fit}

## Overhead (Fig. 14)
Shares of the time that answers in time took. Held back: simulated (waited although a replica had a
free place; hopeless requests, which wait behind all others, are not in it). Deciding: processor
time of the policy, measured on the machine that ran this.
Paper: both together under 2 % in the mean, never above 5 %.

{overhead}

## Ablations at 2x
![Ablations](ablations.png)

{ablations}

## Cost of simulating by cluster size
![Cost](cost.png)

Measured: {cost_requests} requests at about 70 % load, policy `collm`, one core.

| replicas | requests a CPU second | CPU seconds |
|---|---|---|
{cost}
"""
