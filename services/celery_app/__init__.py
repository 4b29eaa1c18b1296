"""What is done on Celery's side: a front door for its programs, webhooks, uploads, small side jobs.
Never the encode, denoise or decode of a job."""
