"""Commands that show how true predictions are:

demo       the main job on this machine, from measuring to comparing
reproduce  published figures beside predictions
validate   many configurations, predicted and then run
"""
