"""Many configurations, predicted and run:

spec   the campaign's file, its artifacts and their statistics
run    predicts, executes and compares each configuration
table  the campaign's page
"""
