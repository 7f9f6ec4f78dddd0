"""What the Trainer is made of: from a batch to a loss, a gradient, an update, and its numbers.

recipe        how a batch becomes a loss            denominators  what torch's losses divide by
rehearsal     is that loss a mean over samples?     precision     half types and the scale
carrier       what ranks tell each other in a step  update        one optimizer step
verdict       is a step good?                       schedule      the learning rate
averages      totals and weights by name            history       every number of a run
every         how often                             notices       what a user is told
given         what users give, made and checked     measures      metrics of training batches
modes         eval mode for a while
"""
