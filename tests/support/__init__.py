"""What several tests share: models, scenarios, programs and ways to run them."""
