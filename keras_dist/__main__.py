"""`python -m keras_dist` runs `keras-dist`."""

import sys

from keras_dist_cli import main

sys.exit(main())
