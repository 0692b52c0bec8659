"""The words of docs/evaluation/README.md; ``page.write`` fills in the numbers."""

CAUTION = """\
Quality comes from the loss curve `{curve}` (`config/curves`; `python -m sim.fit_curve` fits one to
a real run). It was fitted up to {samples:,} samples, cross-entropy {loss}
([simulator](../performance.md#simulator)). Here `collm` learns {learnt:,.0f} samples at 1x and the
curve falls to {ends:.2f}: {beyond_it}. A quality above 1
(cross-entropy below 1) begins at {one:,.0f} samples, {beyond:.0f} times as many as were seen; a
real model would level off earlier. At the last loss that was seen quality is {seen:.2f}, {gain:.2f}
times the initial adapter's {initial:.2f}; more than that of a ratio of Q-goodput no measurement
bears out. Three more things:

- The curve is of a model of 135M parameters, the hardware profile of one of 8B.
- The curve's samples have 96 tokens; the profile's training speed is reckoned for samples of 512
  (`sim/roofline.py`), which errs to the slow side.
- A replica holds {each:,} samples (`sim/rounds.py`). At 1x they are gone through at least {passes}
  times, each time as if they were new.

Figures that rest on this are marked *extrapolated*: 2, 3, 12a, 12b, Q-goodput in 10 and the
ablations. Goodput, attainment and latencies depend on the curve only by when sessions end."""

TEXT = """# Evaluation by simulation

Written by `make figures` on {date}. Everything on this page is simulated on virtual time with the
dispatcher's own policies, unless it says otherwise: {replicas} replicas with profile `{profile}`
(derived from published figures, not measured), {hours:g} hours of {source}. 1x = {unit:.2f} times
the recorded rate; 4x is 1.1 times the load at which round robin's attainment falls under 90 % of an
idle cluster's, on the same requests. SLO: code 0.5 s end to end; conversation 1 s to the first
token and 50 ms a token. The baselines serve the initial adapter and never train. "The paper" is
CoLLM ([arXiv 2604.16400](../comparison.md#references)). What this page shows, and what it misses
against the paper: [findings.md](findings.md).

## Before you read a number

### Quality is extrapolated

{caution}

### What the simulator gets wrong

The same requests through real processes and through the simulator, errors relative to the real run;
in performance under [simulator](../performance.md#simulator) and
[real services](../performance.md#the-pacing-policy-on-real-services):

| real run | goodput | attainment | E2E p99 |
|---|---|---|---|
| 16 emulated replicas, 6 and 4 times slower, ten seconds of the cluster's own time: conversation \
at 1x, 2x and 4x, all policies, valid | within 5 %; split -7 %, shepherd up to +11 % \
| within 0.03 | -8 to +2 %; shepherd +13 to **+25 %** |
| the same, code at 4x | within 6 % | within 0.05 \
| -8 to +9 %; least_loaded +15 %, shepherd **-20 %** |
| 16 emulated replicas, 24 times slower, 4x, ten valid runs | within 10 % in six; \
dlora +10.5 %, round_robin +27 %, peft +42 and **+78 %** \
| within 0.04; peft up to +0.17 | -15 to +29 % |
| the same, conversation for twice as long, 2x and 4x, seven valid runs \
| within 8 %; split **+22 %** \
| within 0.05 | -11 to +3 % |
| 8 and 16 emulated replicas, 4 times slower (void: step lag) \
| +2 to +9 % | within 0.02 | -14 to +1 % |
| 16 emulated replicas in real time, code (void: step lag) | +22 to +34 % | +0.06 to +0.13 | – |
| two real CPU replicas (AVX512, 2026-12-01) at 0.5 of the recorded rate, all policies \
| within 1 % | 0.0 | +3 to +11 % |
| the same at 1.5, beyond what they carry \
(with the speed of the very run: -21 to +12 %, within 0.05) \
| +14 to **-51 %** | +0.07 to **-0.17** | **-20 to +34 %** |
| two real CPU replicas (AVX2, 2026-12-01) at 0.6, where round robin has four of ten late, \
three policies | within 4 % | within 0.05 | 0 to -14 % |
| the same at 0.3 | within 1 % | 0.0 | -8 to -12 %; collm **-21 %** |
| two real CPU replicas, not full | within 1 % | within 0.004 | +2 to +8 %; collm **+21 %** |
| two real CPU replicas at their limit, after mends \
(AVX2; one profile, then one of a slower minute) \
| -0.2 to -14 %, then -5 to **-30 %** \
| within 0.03, then -0.13 | -8 to **+23 %**, then **+43 %** |
| the same before them (AVX512) | **+53 to +107 %** | **+0.12 to +0.24** | -9 to **-36 %** |

And real runs in which `collm` is not ahead, or hardly: two real CPU replicas of one thread,
attainment 0.707 where dlora has 0.760 and least_loaded 0.733 (75 requests, AVX2); code at 4x on 16
emulated replicas, 1.00 times Shepherd's goodput in ten seconds and 1.04 times in a burst (wanted:
1.15, **missed**); conversation at 4x, 1.05 times the best baseline's in ten seconds, in which it
answers all (**missed**), 0.98 times round robin's in a burst of 2.5 s, 1.15 times the best in five
seconds from the middle of the trace. One run each. No run on a GPU stands behind any figure here.

### Seeds

Policies by loads, training and overhead: {seeds} seed(s), mean ± half the range; of "worst
interval" the largest. Pairs, shared against isolated, with adapters, quality over time, pacing, fit
and ablations: one seed (0). With traces a seed changes only the jitter of the steps, never the
requests, so that ± says nothing about other traffic.

### Words

- **Attainment**: requests answered within all their limits, over all requests offered.
- **Goodput**: output tokens of answers in time, a second, until the last arrival or answer in time.
- **Quality**: 1 / max(CE, 0.05), CE the cross-entropy (nats a token) that the loss curve gives the
  version in service. The initial adapter has {initial:.2f}.
- **Q-goodput**: goodput, each token weighted by the quality of the version that is served when its
  answer ends.
- **Samples learnt**: training samples, each counted as what it is worth in batches of the curve's
  run.
- **Share training** (share of compute that trains): replica time in which a micro-step computes,
  over all replica time. A replica that serves beside it counts whole.
- **Fluid bound**: min(tokens/s offered, what all replicas carry at their best batch with mean
  lengths and nothing waiting); no policy can pass it.

## Load (paper: Fig. 1)
![Requests a second](load.png)

## Goodput by policy (Fig. 10)
![Goodput](goodput_tokens_per_s.png)

{goodput}

Attainment:

{attainment}

![Attainment](slo_attainment.png)

Ours over each baseline, by task; bold: below 1, a miss. Without adapters in the requests, as here,
dlora decides as least_loaded does ([with adapters](#with-adapters) further down):

{ratios}

Against the fluid bound (aims: goodput 90 %, Q-goodput 85 % of the bound times the quality at the
end):

{bounds}

## Q-goodput by policy (Fig. 10; extrapolated)
![Q-goodput](q_goodput.png)

{q_goodput}

On conversation alone, over `peft`:

{over_peft}

## Time to first token (Fig. 4)
![p99 TTFT](p99_ttft_ms.png)

{ttft}

The policy `collm` lets hopeless requests wait behind all others (best effort), so its p99 over all
requests under overload is the waiting of those it gave up, not of those it served in time.

## Utilisation and training (Fig. 11a)
![Utilisation](utilisation.png)

{training}

The paper reports about 30 % of compute training at 1x and none at 4x on the conversation trace.
Quality at the end is extrapolated.

In a lull, here the tenth of the intervals with the fewest requests, replicas are busy for this
share of the time (of serving and training of a replica in an interval the larger; `collm` trains
where it can, the baselines never). The first minute counts, too, in which the launcher has not seen
enough to call a replica Idle. Paper: over 70 % where the baselines have less than 45 %.

{lull}

## Memory (Fig. 11b)
![Memory](memory.png)

Computed from published sizes for `h20-8b` (two GPUs), not measured; what sharing costs on real
replicas is measured by `make bench-sharing`.

| | GB | of that weights | KV |
|---|---|---|---|
{memory}

| a second copy costs | reckoned here | paper, a 7B model |
|---|---|---|
| to load | +{copy_load} s (`load_seconds` of the profile: weights from disk) | +30 s (127 %) |
| memory | +{copy_gb} GB ({copy_share}) | +20 GB (50 %) |

## Pacing (Fig. 5 and 13)
![Served a second](served.png)

Relative variance (variance / mean²) of requests ended a second at 2x, collm / round robin (aim: at
most 1/3): on the fullest replica {pacing_fullest}, median over the replicas {pacing}. The pacing
policy fills the first replicas and leaves the peaks to the last ones, which therefore serve less
evenly than round robin's. Fifteen minutes in which nothing trains. In real time: `python -m
bench.pacing`.

The level lines are the ideal mode (b* = λτ): reckoned from the profile's coefficients and the mean
rate and lengths of the requests, not from what a policy did with them. {ideal_offered} requests/s
come at a constant rate and are divided evenly among the replicas in use: all of them under round
robin, under the pacing policy as few as carry the load and a fifth more ({ideal_carried} requests/s
each at their best batch). τ is the time of a request of mean length among b*. Distance: root mean
square of what the fullest replica ended a second, less λ, over λ.

{ideal}

## Quality over time (Fig. 3 and 12a; extrapolated)
![Quality](quality.png)

Share of answers with a quality above 1 at 2x (paper: over 80 % with sharing, 40 % with separate
training, under 10 % without). Where 1 is passed is the curve's saying, not a measurement's:

| | above 1 |
|---|---|
{above}

## Batch pairs against the coordinator (Fig. 12b; extrapolated)

(B, b) of every client, at 1x.

{pairs}

Time to the cross-entropy that all of them reach, the coordinator's = 1 (paper: (16, 4) 1.63,
(4, 16) 1.58): {jct}

## Shared replicas against the isolated design (Fig. 2; extrapolated but for goodput)
The isolated design serves the version of a session only when that session has ended. v2 of the
paper reports up to 3x the goodput of systems that isolate the two workloads; with which division
one compares decides the ratio.

{split}

## With adapters
In {adapter_minutes} minutes of arrivals every request names one of sixteen adapters, by Zipf's law
with exponent 1. Every replica can serve all of them; nothing trains. "dlora, merging": its replicas
merge the adapter that most ask for where that pays, as the authors' do; in all other rows none is
merged. dlora's rule counts batches of 32: while no replica holds so many requests it decides as
least_loaded does here, too.

{adapted}

## Fit of the latency model (Fig. 9)
![Iterations](fit.png)

The coordinator's own fit on what the simulated replicas report (5 % jitter). It shows what the
second variable explains, not how well hardware follows the model: the simulated steps are made by
the very plane that is fitted. The second row mixes iterations alone and beside training. Paper: the
one-variable fit falls from 0.994 to 0.758 beside training.

| | samples | R² in b and B | R² in b alone |
|---|---|---|---|
{fit}

## Overhead (Fig. 14)
Shares of the time that answers in time took. Held back: simulated (waited although a replica had a
free place; hopeless requests, which wait behind all others, are not in it). Deciding: processor
time of the policy, measured on the machine that ran this. Worst interval: the largest share held
back in any interval (two seconds in half an hour) of any seed. Paper: both together under 2 % in
the mean, never above 5 %.

{overhead}

## Ablations at 2x (Q-goodput extrapolated)
![Ablations](ablations.png)

{ablations}

The order of replicas by quality is not among them: all simulated replicas serve the same version,
so that taking it out could show nothing.

## Cost of simulating by cluster size
![Cost](cost.png)

Measured: {cost_requests} requests at about 70 % load, policy `collm`, one core.

| replicas | requests a CPU second | CPU seconds | most memory, MB |
|---|---|---|---|
{cost}
"""
