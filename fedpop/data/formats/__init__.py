"""Files of labelled images in the forms in which they are published, decoded into bytes. No pickle."""
