"use strict";

// Without validatorUrl: null it shows the OpenAPI to a validator elsewhere.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
