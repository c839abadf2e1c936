"""Train a draft: `deepspeed … ./trainer_base_ds_mul_fs_tp.py -cp conf/exp -cn <experiment> [key=value …]`."""

from longspec.train.trainer import main

if __name__ == "__main__":
    main()
