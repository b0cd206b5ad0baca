"""The text of the report, as templates that figures fill in."""

from __future__ import annotations

from string import Template

HEAD = Template("""\
# hPLMs beside dedicated models: measurements

These are the workloads and figures of HMI (7.2-7.4, 7.8). All schemes serve the same tenants on the
same Triton. Weights are random, because speed and memory do not depend on them. The page is made by
`python -m research.comparison.figures`; the numbers behind it are in `results/`.

$machines

""")

SATURATE = Template("""\
## Throughput against tenants, $size (Fig. 11)

![Throughput against tenants]($name.png)

$connections clients send requests. Each sends the next one when the last one is answered. A request
is for any of the tenants; $lengths.

Dedicated and compressed models have memory for $budget. Any other model is read in when a request
needs it. It comes from the page cache, as if host memory held all models. *From disk*, memory holds
those $budget models and nothing else. *Triton's model control* starts a process for each model, as an
operator does today. *One process* copies the new model over another one.

A number is $seconds s of load. Where models take seconds to load, it stands on few requests. To show
how steady the machine was, bare matrix products were timed before and after each number:
$speeds GFLOP/s.

$table

$ratios

## Memory, $size (Table 2)

![Memory of one model more]($name-memory.png)

Weights alone, as the paper counts them. *Shared* weights are there once. *A model* is what one more
model takes of the device. What is *swapped* stays in host memory, and has a place on the device
while it is used. Tables are mapped files.

$memory

""")

SLOWDOWN = Template("""\
## What swapping models costs, $size (Fig. 3)

![Slow-down against tenants]($name.png)

One client sends a request when the last one is answered. Any tenant is as likely as any other;
$lengths, for $seconds s. Memory has room for $budget whole models; *not in memory* is the share of
requests whose model has to be read first. *Slow-down* is the mean time of a request over that with
the fewest tenants.

$table

""")

STEADY = Template("""\
## Response time against tenants, $size (Fig. 12)

![Response time against tenants]($name.png)

Every tenant sends a request each 20 s; $lengths, for $seconds s. Time counts from the moment a request
was due. A request without an answer within $patience s is given up, and is not in the median. The
speed is that of bare matrix products before and after each number:

$table

""")

BURST = Template("""\
## Response times under a burst, $size (Fig. 13)

$pictures

250 users start, one every 0.05 s. Each sends a request every 1.2 s, even if the last one is not
answered yet; $lengths. The figures are of the first $seconds s.
A curve that ends below 100 % has requests that were not answered within $patience s. Median and 99 %
leave these out.

The schemes ran one after the other, not in turns. Do not compare their times where the speed of the
machine was another one, or where not all requests were answered. The figures stand on this page
alone for that reason.

$table

""")

PIPELINE = Template("""\
## What pipelining gains (Table 6)

![Pipeline ablation](pipeline.png)

$case.

$noise
| | requests a second | relative to nothing ahead |
|---|---|---|
$rows

""")

SAME_ON_CPU = Template("""\
On a CPU the first two rows are the same code, measured twice. They differ by $share, which is noise.
A smaller difference between other rows is no effect either.

Looking up rows and copying adapters can be hidden behind computing only where another processor
does part of the work. HMI had a GPU beside its CPU, and gained 25 % (304.8 to 380.9 requests a
second). A GPU would have to show two things, each beyond its own noise: everything ahead is faster
than nothing ahead, and slower as soon as one of the steps is left out.
""")

TIMELINE = """\
## A pipeline at work (Fig. 17)

![Timeline of the pipeline](timeline.png)

The picture shows a few batches from the middle of the run, by their numbers. While one batch
computes, the next is chosen and prepared, and the one before is answered. *Prepare* finds slots,
*swap* copies adapters into them, *retrieve* gathers rows of tables. The whole run is in
[timeline-trace.json](timeline-trace.json), which chrome://tracing and ui.perfetto.dev open.

"""

RATIOS = {
    "hplm_to_dedicated_at_least_tenants": "hPLM over a dedicated model under model control, fewest tenants",
    "hplm_to_dedicated_at_most_tenants": "hPLM over dedicated models under model control, most tenants",
    "hplm_to_inprocess": "hPLM over dedicated models in one process, most tenants",
    "hplm_to_inprocess_from_disk": "the same, models from disk",
    "hplm_most_to_least_tenants": "hPLM with the most tenants over hPLM with the fewest",
}
