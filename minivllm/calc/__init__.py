"""The numbers an interview asks for: pure functions of the standard library, units in every name or docstring.

Everything here is a bound or an estimate, computed from datasheets and shapes; nothing is measured. Sizes are bytes.
A GB is 10**9 bytes (datasheets, file sizes), a GiB 2**30 (what memory tools report); 80 GB of weights are 74.5 GiB.
"""
