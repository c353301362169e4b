"""Times of real servers beside kvplan's: the facts, the predictions, the scores, the fit and the page."""
