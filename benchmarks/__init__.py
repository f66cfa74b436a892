"""What aiolock costs, side by side with its peers and with the least that is possible: ``python -m benchmarks``.

The parent process starts servers (:mod:`benchmarks.suites`), decides who competes in what (:mod:`benchmarks.scenarios`),
and only reports. All measuring happens in worker processes (:mod:`benchmarks.workers`, :mod:`benchmarks.worker`), which run
jobs (:mod:`benchmarks.jobs`) with one contestant at a time (:mod:`benchmarks.contestants`).

Rounds alternate between the contestants, so that a machine that is busy for a while is busy for all of them; what is
reported is the median of the rounds and their spread, and ratios are taken round by round. ``results`` holds the run
that the pages quote; :mod:`benchmarks.pages` writes its figures into them.
"""
