"""The end-to-end rig: real vLLM engines, the real daemon, and comparisons that cannot pass by accident.

Read in the order of a test: `models` makes tiny models, `workload` says what is asked of them, `baseline` what the
answers are without Forebay, `engine` and `server` run vLLM, `daemon` runs `forebay serve`, `compare` judges.
"""
