"""Results for people and for other tools:

text      numbers with units, as tables and messages show them
plots     pictures of a trace with matplotlib
perfetto  a trace for ui.perfetto.dev, chrome://tracing and Holistic Trace Analysis
"""
