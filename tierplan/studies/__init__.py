"""What-if questions over many scenarios:

study        a grid of scenarios, from a TOML file or made in code
defaults     what `auto` means for training settings, and where a workload comes from
evaluate     one scenario as a row of figures
sweep        many rows in parallel, each kept as soon as it is there
advise       can I train this, how fast, what limits it, what should I buy
advice_text  the advice as text and as a page
policy_plot  policies side by side as a picture
"""
