"""The words of the report; figures fill them in."""

from __future__ import annotations

from string import Template

HEAD = Template("""\
# What was measured

Workloads and figures of HMI (7.2-7.4, 7.8): all schemes from the same tenants, on the same Triton. Weights are random: speed
and memory do not depend on them. Made by `python -m research.comparison.figures`; the numbers behind it lie in `results/`.

$machines

""")

SATURATE = Template("""\
## Throughput against tenants, $size (Fig. 11)

![Throughput against tenants]($name.png)

$connections clients, each sending its next request when the last is answered, each request for any of the tenants; $lengths.
Dedicated and compressed models have memory for $budget. The others are read in when they are asked for: from the page
cache, as if host memory held all of them, or *from disk*, where memory holds those $budget and nothing else. *Triton's model
control* starts a process for each model, as an operator does today; *one process* copies it over another one's place.
A number is $seconds s of load; where models take seconds to come, few requests stand behind it. How steady the machine was
meanwhile: bare matrix products before and after each number, $speeds GFLOP/s.

$table

$ratios

## Memory, $size (Table 2)

![Memory of one model more]($name-memory.png)

Weights alone, as the paper counts. *shared* is there once, *a model* is what one more takes of the device; what is *swapped*
waits in host memory and has a place on the device while it is used. Tables are mapped files.

$memory

""")

STEADY = Template("""\
## Response time against tenants, $size (Fig. 12)

![Response time against tenants]($name.png)

Every tenant sends a request each 20 s, $lengths, for $seconds s. Time counts from the moment a request was due. Who is not
answered within $patience s is given up, and not in the median:

$table

""")

BURST = Template("""\
## Response times under a burst, $size (Fig. 13)

$pictures

250 users, one more every 0.05 s, a request each 1.2 s whether the last one was answered or not; $lengths, the first $seconds s
of it. A curve that ends below 100 % has requests that were not answered within $patience s.

$table

""")

PIPELINE = Template("""\
## What pipelining is worth (Table 6)

![Pipeline ablation](pipeline.png)

$case. Looking up and bringing adapters can only be hidden behind computing where another processor does one of them: HMI had
a GPU beside its CPU.

| | requests a second | of nothing ahead |
|---|---|---|
$rows

""")

TIMELINE = """\
## A pipeline at work (Fig. 17)

![Timeline of the pipeline](timeline.png)

A few batches from the middle, by their numbers: while one computes, the next is chosen and made ready (*prepare* finds slots,
*swap* copies adapters into them, *retrieve* gathers rows of tables), and the last one is answered. All of it is in
[timeline-trace.json](timeline-trace.json), which chrome://tracing and ui.perfetto.dev open.

"""

RATIOS = {
    "hplm_to_dedicated_at_least_tenants": "hPLM over a dedicated model, fewest tenants",
    "hplm_to_dedicated_at_most_tenants": "hPLM over dedicated models under model control, most tenants",
    "hplm_to_inprocess": "hPLM over dedicated models in one process, most tenants",
    "hplm_to_inprocess_from_disk": "the same, models from disk",
    "hplm_most_to_least_tenants": "hPLM, most tenants over fewest",
}
