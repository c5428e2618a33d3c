"""The instruments: which tokens a mask drops, whether it was right, and what a run came to."""


class AnalysisError(ValueError):
    """Something that cannot be analysed; the text says why and what to do."""
