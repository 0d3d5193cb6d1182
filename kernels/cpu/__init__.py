"""The fast CPU path: few, large torch calls; oneDNN layouts where they pay."""
