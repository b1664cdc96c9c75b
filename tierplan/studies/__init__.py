"""What-if questions over many scenarios:

study        a grid of scenarios, from a TOML file or made in code
defaults     what `auto` means for training settings, and where a workload comes from
evaluate     one question, one answer: the best plan, or what a policy reaches
frontier     the step time against device memory
answer       the best plan as JSON values and as lines
sweep        many rows in parallel, each kept as soon as it is there
purchases    what could be bought for a machine, and what a training job takes: hours, energy, money, wear
advise       can I train this, how fast, what limits it, what should I buy
advice_text  the advice as text and as a page
page         the what-if page: a grid of answers in one file
explore      a workload on a machine with sliders, in a notebook
slow_step    is my slow step normal, and what to change first
"""
