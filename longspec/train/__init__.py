"""Training. DeepSpeed's remark that there is no GPU is left out, because every run logs its device."""

from logging import getLogger  # the module's name is that of a module of this package

getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
