"""Training. DeepSpeed's remark that there is no GPU is left out, because every run logs its device."""

import logging

logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
