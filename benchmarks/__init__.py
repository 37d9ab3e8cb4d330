"""Speed, measured as ratios inside one process: ``make bench``.

Programs are timed in turns, on one thread, so that what disturbs one disturbs them all. Ratios are of
processor seconds, which on an idle machine are seconds; those of the wall clock are recorded as well.
"""
