"""`python -m keras_dist` is `keras-dist`."""

import sys

from keras_dist.cli import main

sys.exit(main())
