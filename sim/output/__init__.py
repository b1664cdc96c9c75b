"""Results for people and for other tools:

text      numbers with units, as tables and messages show them
drawn     what pictures of a trace share: colours, lanes, holdings
plots     pictures of a trace with matplotlib
timeline  a timeline to zoom into, as a part of a page
perfetto  a trace for ui.perfetto.dev, chrome://tracing and Holistic Trace Analysis
"""
